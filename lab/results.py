"""Keep results as JSON lines, one for each task of a cell."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from model_store.errors import DataRejected


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

    @property
    def cell(self) -> tuple[str, str, str, str, int]:
        return (self.method, self.variant, self.preset, self.setting, self.seed)


def append(path: Path, line: Line) -> None:
    """Append a line in one write, so that two runs may share a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = (json.dumps(asdict(line)) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def read(paths: Iterable[Path]) -> list[Line]:
    """Read all lines. Refuse to merge lines of different presets or data."""
    lines = [line for path in paths for line in _read_one(path)]
    for what in ("preset", "data_digest"):
        found = sorted({getattr(line, what) for line in lines})
        if len(found) > 1:
            raise DataRejected(
                f"these lines have different values of {what}: {', '.join(found)}; "
                "a table holds lines of one preset and one data set"
            )
    return lines


def _read_one(path: Path) -> list[Line]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataRejected(f"{path} cannot be read: {error}") from error
    return [
        _line(record, where=f"{path} line {number}")
        for number, record in enumerate(text.splitlines(), start=1)
        if record.strip()
    ]


def _line(text: str, *, where: str) -> Line:
    try:
        return line_of(json.loads(text))
    except (ValueError, TypeError) as error:
        raise DataRejected(f"{where} is not a result: {error}") from error


def line_of(record: dict[str, Any]) -> Line:
    """Make a line of its JSON object. Raise ValueError for other members."""
    names = {one.name for one in fields(Line)}
    if set(record) != names:
        raise ValueError(f"its members are not {', '.join(sorted(names))}")
    return Line(**{**record, "accuracies": tuple(record["accuracies"])})
