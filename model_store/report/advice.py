"""Define the record of advice on a version, which names what would help it most.

The record stands beside the manifest, because it names files of people: it can be deleted, and
only clients that may label see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from model_store.errors import VersionNotFound
from model_store.layout import FORGOTTEN, ITEM_ID, advice_name, forgotten_of
from model_store.names import is_same
from model_store.records.manifest import Manifest
from model_store.records.sealing import (
    FORMAT,
    Count,
    Record,
    Sha256,
    Share,
    Text,
    Timestamp,
    Transaction,
    Version,
    create_record,
    find_record,
    make_record,
)
from model_store.store.store import Store
from model_store.tables import counted, percent

MAX_NAME = 300
MAX_LISTED = 100
"""The most label errors, and the most copies, that a record names. It counts all of them."""
LOOKED_AT = 6
"""The most images that a record names for a confusion."""

ClassName = Annotated[str, Field(min_length=1, max_length=200)]
Points = Annotated[float, Field(ge=-1, le=1)]


class AdvisedImage(Record):
    """An image of the run, by its name in the data, by its id if it is of the inbox, and by the
    digest that it has if the store keeps it."""

    name: Annotated[str, Field(max_length=MAX_NAME)]
    item: Annotated[str, Field(pattern=f"^{ITEM_ID}$")] | None = None
    kept: Annotated[Sha256 | None, Field(exclude_if=lambda kept: kept is None)] = None
    """Left out where it is not known: advice that is older than the member keeps its bytes."""


class ClassAdvice(Record):
    """The gain by more images of a class."""

    class_name: ClassName = Field(alias="class")
    images: Count
    accuracy: Share | None
    """The share of left-out images of the class that a classifier on the same tokens has right."""
    more: Count = 0
    gain: Points | None = None
    """The accuracy that `more` images would add; null where there is no forecast."""
    why: Text | None = None
    """The reason why there is no forecast."""


class Confused(Record):
    """Two classes whose left-out images are confused, with the most doubtful images."""

    class_name: ClassName = Field(alias="class")
    taken_for: ClassName
    count: Count
    images: Annotated[tuple[AdvisedImage, ...], Field(max_length=LOOKED_AT)]


class Suspect(Record):
    """An image that probably belongs to another class than its label says."""

    image: AdvisedImage
    class_name: ClassName = Field(alias="class")
    likelier: ClassName
    score: Share
    """The probability of the label, by the images of all other folds. A small one is in doubt."""


class Copy(Record):
    """An image to judge by that is nearly the same as one to learn from."""

    judged: AdvisedImage
    learnt: AdvisedImage
    class_name: ClassName = Field(alias="class")
    bits: Annotated[int, Field(ge=0, le=64)]
    """The bits in which their perceptual hashes differ."""


class Advice(Record):
    """The advice itself, the most helpful first."""

    classes: tuple[ClassAdvice, ...] = ()
    confused: Annotated[tuple[Confused, ...], Field(max_length=MAX_LISTED)] = ()
    suspects: Annotated[tuple[Suspect, ...], Field(max_length=MAX_LISTED)] = ()
    suspects_in_all: Count = 0
    copies: Annotated[tuple[Copy, ...], Field(max_length=MAX_LISTED)] = ()
    copies_in_all: Count = 0
    notes: tuple[Text, ...] = ()
    """Sentences on what could not be computed."""


class _AdviceRecord(Record):
    """`advice/<version>.json`."""

    format: Literal[1] = FORMAT
    version: Version
    manifest_digest: Sha256
    advice: Advice
    time: Timestamp
    transaction: Transaction


def write_advice(store: Store, manifest: Manifest, advice: Advice) -> None:
    """Write the advice on a version that is published. The first one that is written stays."""
    record = make_record(
        _AdviceRecord, version=manifest.version, manifest_digest=manifest.digest, advice=advice
    )
    create_record(store.objects, advice_name(manifest.version), record)
    # Checked after the write: a deletion that comes later finds the advice and deletes it.
    if not _stands(store, manifest):
        store.objects.delete(advice_name(manifest.version))


def read_advice(store: Store, manifest: Manifest) -> Advice | None:
    """Read the advice on a version. Return None where there is none, and where it is about another
    version that had the number before."""
    record = find_record(store.objects, advice_name(manifest.version), _AdviceRecord)
    if record is None or record.manifest_digest != manifest.digest:
        return None
    return record.advice


def drop_advice_on(store: Store, manifests: Iterable[Manifest], class_name: str) -> None:
    """Delete the advice on all versions that know a class: it may name files of the class."""
    for manifest in manifests:
        if any(is_same(name, class_name) for name in manifest.spec.classes):
            store.objects.delete(advice_name(manifest.version))


def _stands(store: Store, manifest: Manifest) -> bool:
    """Return whether the version is there and nothing that it names has been forgotten."""
    try:
        store.manifest(manifest.version)
    except VersionNotFound:
        return False
    gone = {forgotten_of(entry.name) for entry in store.objects.list(FORGOTTEN)}
    return not any(ref.sha256 in gone for ref in manifest.shards)


MOST_LINES = 5
LEAST_GAIN = 0.01
"""A point: less is not worth a line."""
_MOST_GAINS = 2
"""Lines on gains, so that a confusion has a line too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A sentence, and the images that it is about."""

    text: str
    images: tuple[AdvisedImage, ...] = ()


def lines(advice: Advice) -> tuple[Line, ...]:
    """Write at most five lines: labels and copies first, because they distort all other figures."""
    gains = [row for row in advice.classes if row.gain is not None and row.gain >= LEAST_GAIN]
    said = [*_suspects(advice), *_copies(advice)]
    said += [Line(text=_gain(row)) for row in gains[:_MOST_GAINS]]
    for pair in advice.confused[:1]:
        said.append(Line(text=_pair(pair, named=_told(pair.images)), images=pair.images))
    known = [row for row in advice.classes if row.gain is not None]
    if known and not gains:
        more = counted(max(row.more for row in known), "more image")
        said.append(Line(text=f"No class gains a point from {more}."))
    said += [Line(text=note) for note in advice.notes]
    without = [row for row in advice.classes if row.why is not None]
    if without:
        many = counted(len(without), "class", "classes")
        why = f"{without[0].class_name}: {without[0].why}"
        said.append(Line(text=f"Nothing can be said of {many}. {why}."))
    return tuple(said[:MOST_LINES])


def in_full(advice: Advice) -> list[str]:
    """Write all of the advice, one thing a line."""
    told = [_class(row) for row in advice.classes]
    told += [_pair(pair, named=_names(pair.images)) for pair in advice.confused]
    told += [
        f"{suspect.image.name} is labelled {suspect.class_name} and looks like {suspect.likelier}."
        for suspect in advice.suspects
    ]
    told += [
        f"{copy.judged.name} is nearly a copy of {copy.learnt.name}." for copy in advice.copies
    ]
    return [*told, *advice.notes]


def _names(images: Sequence[AdvisedImage]) -> str:
    return ", ".join(image.name for image in images)


def _class(row: ClassAdvice) -> str:
    if row.gain is None:
        return f"{row.class_name}: nothing can be said; {row.why}."
    return f"{_gain(row)[:-1]} ({percent(row.accuracy)} of {counted(row.images, 'image')} now)."


def described(advice: Advice | None) -> dict[str, Any] | None:
    """Describe the advice as plain data, with its lines."""
    if advice is None:
        return None
    told = [
        {"text": line.text, "images": [image.model_dump() for image in line.images]}
        for line in lines(advice)
    ]
    return {"lines": told, **advice.model_dump(mode="json", by_alias=True)}


def _suspects(advice: Advice) -> list[Line]:
    if not advice.suspects:
        return []
    first = advice.suspects[0]
    many = counted(advice.suspects_in_all, "image looks", "images look")
    own = "its" if advice.suspects_in_all == 1 else "their"
    return [
        Line(
            text=f"{many} more like another class than like {own} own. Look first at "
            f"{_told([first.image])}: it is labelled {first.class_name} and looks like "
            f"{first.likelier}.",
            images=tuple(suspect.image for suspect in advice.suspects),
        )
    ]


def _copies(advice: Advice) -> list[Line]:
    if not advice.copies:
        return []
    first, many = advice.copies[0], advice.copies_in_all
    told = "is nearly a copy" if many == 1 else "are nearly copies"
    return [
        Line(
            text=f"{counted(many, 'image')} to judge by {told} of images to learn from, so the "
            f"accuracy looks better than it is: {_told([first.judged])} and "
            f"{_told([first.learnt])}.",
            images=tuple(image for copy in advice.copies for image in (copy.judged, copy.learnt)),
        )
    ]


def _gain(row: ClassAdvice) -> str:
    points = round(100 * (row.gain or 0.0))
    more = counted(row.more, "more image")
    return f"About {more} of {row.class_name}: + {counted(points, 'point')}."


def _pair(pair: Confused, *, named: str) -> str:
    how_many = counted(pair.count, "image")
    return f"{pair.class_name} is confused with {pair.taken_for} ({how_many}): look at {named}."


def _told(images: Sequence[AdvisedImage]) -> str:
    """Name images, and count those of the inbox: their ids mean nothing to people."""
    names = [image.name for image in images if image.item is None]
    items = len(images) - len(names)
    return ", ".join([*names, *([counted(items, "image") + " of the inbox"] if items else [])])
