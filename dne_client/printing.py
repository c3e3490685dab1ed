"""Print outcomes for people and for programs."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from typing import Any, TextIO

from dne_client.answers import Outcome, Prediction
from model_store.tables import counted, percent, printable

FORMATS = ("table", "json", "jsonl", "csv")
COLUMNS = ("file", "label", "score", "unknown", "unknown_score", "task", "version", "error")
NAME_WIDTH = 40
LABEL_WIDTH = 36


@dataclass(slots=True)
class Told:
    """Count what was printed."""

    answered: int = 0
    unknown: int = 0
    failed: int = 0
    versions: set[int] = field(default_factory=set)

    def add(self, outcome: Outcome) -> None:
        if outcome.prediction is None:
            self.failed += 1
            return
        self.answered += 1
        self.unknown += outcome.prediction.unknown
        self.versions.add(outcome.prediction.version)


class Printer:
    """Prints each outcome as it comes, except as one JSON object, which is printed at the end."""

    def __init__(self, form: str, *, out: TextIO) -> None:
        self._form = form
        self._out = out
        self._kept: list[dict[str, Any]] = []
        self._rows = csv.DictWriter(out, COLUMNS, lineterminator="\n", extrasaction="ignore")
        if form == "csv":
            self._rows.writeheader()

    def show(self, outcome: Outcome) -> None:
        if self._form == "table":
            print(_line(outcome), file=self._out)
            return
        row = as_json(outcome)
        if self._form == "csv":
            self._rows.writerow({name: _cell(row.get(name)) for name in COLUMNS})
        elif self._form == "jsonl":
            print(json.dumps(row, allow_nan=False), file=self._out)
        else:
            self._kept.append(row)

    def close(self, told: Told, *, seconds: float) -> None:
        """Print the end: a sentence below a table, or the one JSON object."""
        if self._form == "table":
            print(_summary(told, seconds), file=self._out)
        elif self._form == "json":
            whole = {
                "answered": told.answered,
                "unknown": told.unknown,
                "failed": told.failed,
                "versions": sorted(told.versions),
                "seconds": round(seconds, 3),
                "predictions": self._kept,
            }
            print(json.dumps(whole, allow_nan=False), file=self._out)
        self._out.flush()


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Write an outcome with the names of `POST /predict`, and `file` or `error` beside them."""
    row: dict[str, Any] = {"file": outcome.name}
    found = outcome.prediction
    if found is None:
        return {**row, "error": str(outcome.error)}
    return {
        **row,
        "label": found.label,
        "score": found.score,
        "level": found.level,
        "task": found.task,
        "unknown": found.unknown,
        "unknown_score": found.unknown_score,
        "version": found.version,
        "top": [{"label": one.label, "score": one.score} for one in found.top],
        **({"id": found.id} if found.id is not None else {}),
    }


def _cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def _line(outcome: Outcome) -> str:
    name = printable(outcome.name)
    shown = name if len(name) <= NAME_WIDTH else f"…{name[1 - NAME_WIDTH :]}"
    if outcome.prediction is None:
        return f"{shown:{NAME_WIDTH}}  failed: {printable(str(outcome.error))}"
    return f"{shown:{NAME_WIDTH}}  {_told(outcome.prediction)}"


def _told(found: Prediction) -> str:
    label = printable(found.label)
    if found.unknown:
        return f"not like any class (nearest: {label})"
    group = "  (a group of classes)" if found.level else ""
    return f"{label:{LABEL_WIDTH}}  {percent(found.score):>7}{group}"


def _summary(told: Told, seconds: float) -> str:
    versions = ", ".join(map(str, sorted(told.versions)))
    parts = [
        counted(told.answered, "image") + (f" answered by version {versions}" if versions else ""),
        f"{told.unknown} like no class" if told.unknown else "",
        f"{told.failed} failed" if told.failed else "",
        f"{seconds:.1f} s",
    ]
    return "\n" + ", ".join(part for part in parts if part)
