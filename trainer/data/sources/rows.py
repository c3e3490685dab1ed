"""Turn rows of files and labels into listings, or name every bad row.

One bad row refuses the whole table, before any image is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from model_store.errors import DataRejected, ImageRejected, SpecInvalid
from model_store.names import new_class_name
from model_store.tables import counted, size
from trainer.data.folders import ClassFolder, Listing, and_more
from trainer.data.sources import limits
from trainer.data.sources.limits import Unpacking
from trainer.data.sources.place import ImageSource, Place, inner_parts, shown

MAX_NAMED = 20
MAX_SHOWN = 1000
"""Characters of the name of a bad file."""
TRAIN, VAL, TEST, WHOLE = "train", "val", "test", ""
NAMES = {
    "train": TRAIN,
    "training": TRAIN,
    "val": VAL,
    "valid": VAL,
    "validation": VAL,
    "dev": VAL,
    "test": TEST,
    "testing": TEST,
}
Parts = dict[str, Listing]
"""Listings by the name of their part; WHOLE where the data is not split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A file, its label and its part as a table gives them, unchecked."""

    where: str
    """Tells a user where the row is: `row 3`."""
    file: str = ""
    label: str = ""
    split: str = WHOLE
    group: str = ""
    """Names the images that belong together with this one; empty: none is said to."""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Labelled:
    """One checked row."""

    order: tuple[str | int, ...]
    label: str
    part: str
    picture: ImageSource
    group: str = ""


@dataclass(slots=True)
class Problems:
    """Count the bad rows of one table, and keep the reasons of the first ones."""

    table: Place
    count: int = 0
    told: list[str] = field(default_factory=list)

    def add(self, where: str, file: str, reason: str) -> None:
        self.count += 1
        if len(self.told) < MAX_NAMED:
            named = shown(file[:MAX_SHOWN])
            self.told.append(f"{where} ({named}) {reason}" if file else f"{where} {reason}")

    def refuse_any(self) -> None:
        if self.count:
            named = "; ".join(self.told) + and_more(range(self.count), named=MAX_NAMED)
            raise DataRejected(
                f"{shown(self.table)} has {counted(self.count, 'bad row')}, and nothing of it "
                f"is read: {named}. Correct these rows or take them out"
            )


def part_named(name: str) -> str | None:
    """Tell which part a folder, a file or a row is meant for."""
    return NAMES.get(name.strip().lower())


def read_table(table: Place) -> bytes:
    """Read a file of rows as a whole, within a limit."""
    try:
        table_bytes = table.stat().st_size
        if table_bytes > limits.MAX_FILE_BYTES:
            raise DataRejected(
                f"{shown(table)} has {size(table_bytes)}, and a table may have "
                f"{size(limits.MAX_FILE_BYTES)}: leave out what is not a class of a whole "
                "image, as outlines are, or give the data in parts"
            )
        return table.read_bytes()
    except ImageRejected as error:
        raise DataRejected(f"{shown(table)} cannot be read: {error}") from error
    except OSError as error:
        raise DataRejected(f"{shown(table)} cannot be read: {error.strerror}") from error


def list_rows(
    rows: Iterable[Row], *, table: Place, bases: Sequence[Place], notes: tuple[str, ...] = ()
) -> Parts:
    """List the files of the rows, which are relative to the first base that has them."""
    problems, seen = Problems(table), dict[tuple[str, ...], Row]()
    good: list[Labelled] = []
    # A row takes less than NODE_BYTES, whatever the size of its table.
    unpacking = Unpacking(table, limits.MAX_UNPACKED_BYTES)
    for row in rows:
        unpacking.count_member()
        try:
            good.append(_checked(row, seen, bases))
        except ValueError as error:
            problems.add(row.where, row.file, str(error))
    if not good and not problems.count:
        raise DataRejected(f"{shown(table)} has no rows")
    problems.refuse_any()
    return grouped(good, table=table, notes=notes)


def checked_label(label: str) -> str:
    """Return a label as the name of a class. Raise ValueError with the reason."""
    if not label.strip():
        raise ValueError("has no label")
    try:
        return new_class_name(label)
    except SpecInvalid as error:
        raise ValueError(f"has a label that cannot be used: {error}") from error


def _checked(row: Row, seen: dict[tuple[str, ...], Row], bases: Sequence[Place]) -> Labelled:
    if row.problem is not None:
        raise ValueError(row.problem)
    parts, label = inner_parts(row.file), checked_label(row.label)
    first = seen.setdefault(parts, row)
    if first is not row:
        if first.label != row.label:
            raise ValueError(
                f"is {row.label!r} here and {first.label!r} in {first.where}: an image has one "
                "class"
            )
        raise ValueError(f"came in {first.where} already")
    part = part_named(row.split) if row.split else WHOLE
    if part is None:
        raise ValueError(f"is in the part {row.split!r}; parts are named train, val and test")
    return Labelled(parts, label, part, _found(parts, bases), row.group)


def _found(parts: tuple[str, ...], bases: Sequence[Place]) -> Place:
    places = (base.joinpath(*parts) for base in bases)
    try:
        place = next((one for one in places if one.is_file()), None)
    except OSError as error:
        raise ValueError(f"cannot be found: {error.strerror}") from error
    if place is None:
        raise ValueError("does not exist")
    return place


def grouped(good: Sequence[Labelled], *, table: Place, notes: tuple[str, ...] = ()) -> Parts:
    """Group checked rows by part and class, both by name, as folders are listed."""
    parts: dict[str, dict[str, list[Labelled]]] = {}
    for labelled in good:
        parts.setdefault(labelled.part, {}).setdefault(labelled.label, []).append(labelled)
    if WHOLE in parts and len(parts) > 1:
        raise DataRejected(
            f"{shown(table)} has {counted(sum(map(len, parts[WHOLE].values())), 'row')} without a "
            "part, and others with one: name the part of each, or of none"
        )
    return {
        name: Listing(folder=table, classes=_classes(by_label), notes=notes)
        for name, by_label in parts.items()
    }


def _classes(by_label: dict[str, list[Labelled]]) -> tuple[ClassFolder, ...]:
    return tuple(_class(label, rows) for label, rows in sorted(by_label.items()))


def _class(label: str, rows: Sequence[Labelled]) -> ClassFolder:
    in_order = sorted(rows, key=lambda row: row.order)
    return ClassFolder(
        name=label,
        files=tuple(one.picture for one in in_order),
        groups=tuple(one.group for one in in_order),
    )
