"""Keep results as JSON lines, one for each task of a cell."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from model_store.errors import DataRejected

LATER = ("new_alone", "attention", "recipe", "right")
"""Members that older lines do not have. They are left out where there is nothing to tell."""
Note = Callable[[str], None]
"""Tell the user one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The state of a method after one task."""

    method: str
    variant: str
    preset: str
    setting: str
    """The settings that differ from the preset: `memory=200`."""
    seed: int
    order_digest: str
    data_digest: str
    task: int
    classes: int
    accuracies: tuple[float, ...]
    """The share of right answers on the test images of each task so far."""
    accuracy: float
    """The share of right answers on all test images so far."""
    parameters: int
    flop: int
    """Operations of one answer to one image."""
    served_flop: int | None
    """The same in the form that is served, where there is one."""
    passes: int
    cpu_s: float
    """Seconds of one core for learning this task."""
    shared_base: bool
    """True if the first task was learnt by another cell; `cpu_s` is what it took there."""
    resumed: bool
    """True if the task was learnt in several runs; `cpu_s` is then of the last one."""
    commit: str
    new_alone: float | None = None
    """The share of right answers on the newest task's test images, among its own classes."""
    attention: dict[str, tuple[float, float]] | None = None
    """The share and the mean of each group of pairs, where there is spatial-task attention."""
    recipe: str | None = None
    """The ways in which the preset learns, in words."""
    right: str | None = None
    """One bit for each test image so far, 1 where its answer is right: bytes as hexadecimals."""

    @property
    def cell(self) -> tuple[str, str, str, str, int]:
        return (self.method, self.variant, self.preset, self.setting, self.seed)


def append(path: Path, line: Line) -> None:
    """Append a line. Two runs may share a file, and a line that a kill has torn is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        written = file.read()
        if torn := len(written) - written.rfind(b"\n") - 1:
            file.truncate(len(written) - torn)
        file.write((json.dumps(record_of(line)) + "\n").encode())


def read(paths: Iterable[Path], *, note: Note) -> list[Line]:
    """Read all lines. Refuse to merge lines of different presets, recipes or data."""
    lines = [line for path in paths for line in _read_one(path, note)]
    _refuse_mixed("preset", {line.preset for line in lines})
    _refuse_mixed("recipe", {line.recipe for line in lines if line.recipe is not None})
    _refuse_mixed("data_digest", {line.data_digest for line in lines})
    return lines


def read_beside(path: Path, *, preset: str, data_digest: str, note: Note) -> list[Line]:
    """Read the lines that a cell's own would join; refuse lines of another preset or data."""
    lines = read([path], note=note) if path.exists() else []
    _refuse_mixed("preset", {preset, *(line.preset for line in lines)})
    _refuse_mixed("data_digest", {data_digest, *(line.data_digest for line in lines)})
    return lines


def _refuse_mixed(what: str, found: Collection[str]) -> None:
    if len(found) > 1:
        raise DataRejected(
            f"these lines have different values of {what}: {', '.join(sorted(found))}; "
            "a file and a table hold lines of one preset, learnt in one way from one data set: "
            "choose another --out"
        )


def _read_one(path: Path, note: Note) -> list[Line]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataRejected(f"{path} cannot be read: {error}") from error
    whole, _, torn = text.rpartition("\n")
    if torn:
        note(f"{path}: the last line is torn and is left out; its cell writes it again")
    return [
        _line(record, where=f"{path} line {number}")
        for number, record in enumerate(whole.splitlines(), start=1)
        if record.strip()
    ]


def _line(text: str, *, where: str) -> Line:
    try:
        return line_of(json.loads(text))
    except (ValueError, TypeError) as error:
        raise DataRejected(f"{where} is not a result: {error}") from error


def record_of(line: Line) -> dict[str, Any]:
    """Make the JSON object of a line."""
    record = asdict(line)
    return {name: one for name, one in record.items() if one is not None or name not in LATER}


def line_of(record: dict[str, Any]) -> Line:
    """Make a line of its JSON object. Raise ValueError for other members."""
    names = {one.name for one in fields(Line)} - {*LATER}
    if set(record) - {*LATER} != names:
        raise ValueError(f"its members are not {', '.join(sorted(names))}")
    groups = record.get("attention")
    attention = groups and {name: (share, mean) for name, (share, mean) in groups.items()}
    return Line(**{**record, "accuracies": tuple(record["accuracies"]), "attention": attention})
