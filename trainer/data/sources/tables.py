"""Read rows from CSV and JSONL: a file, its label, and perhaps its part."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_store.errors import DataRejected
from trainer.data.sources.place import JSONL, Place, shown
from trainer.data.sources.rows import Parts, Row, list_rows, read_table

FILE = ("file", "file_name", "filename", "path", "image")
LABEL = ("label", "class", "category")
SPLIT = ("split", "subset")
DELIMITERS = ",;\t"


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that are used, each the first of its names that the table has."""

    file: str
    label: str
    split: str | None
    unused: tuple[str, ...]

    @classmethod
    def among(cls, names: Sequence[str]) -> Columns | None:
        by_name = {name.strip().lower(): name for name in names}
        file, label, split = (
            next((by_name[one] for one in known if one in by_name), None)
            for known in (FILE, LABEL, SPLIT)
        )
        if file is None or label is None:
            return None
        unused = tuple(name for name in names if name not in (file, label, split))
        return cls(file, label, split, unused)


def list_table(table: Place) -> Parts:
    """List the rows of a CSV or JSONL file, whose paths are relative to its folder."""
    names, records = _opened(table)
    columns = Columns.among(names)
    if columns is None:
        raise DataRejected(
            f"{shown(table)} has the columns {', '.join(map(repr, names[:20])) or 'none'}; it "
            f"needs one for the file ({', '.join(FILE)}) and one for the class "
            f"({', '.join(LABEL)}), named in the first line"
        )
    unused = ", ".join(map(repr, columns.unused[:20]))
    notes = (f"columns of {shown(table)} that are not used: {unused}",) if unused else ()
    rows = (_row(where, record, columns) for where, record in records)
    return list_rows(rows, table=table, bases=[table.parent], notes=notes)


def has_labels(table: Place) -> bool:
    """Tell whether a table has columns for files and labels."""
    return Columns.among(_opened(table)[0]) is not None


Record = Mapping[str, Any] | str
"""The fields of a row, or the reason why it has none."""


def _opened(table: Place) -> tuple[list[str], Iterable[tuple[str, Record]]]:
    try:
        text = read_table(table).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataRejected(f"{shown(table)} is not UTF-8 in row {line}") from error
    if table.suffix.lower() in JSONL:
        records = list(_json_lines(text))
        first = next((one for _, one in records if not isinstance(one, str)), {})
        return list(first), records
    return _csv(text, table)


def _csv(text: str, table: Place) -> tuple[list[str], Iterable[tuple[str, Record]]]:
    header = text.partition("\n")[0]
    delimiter = next((one for one in DELIMITERS if one in header), ",")
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = next(lines, [])
    except csv.Error as error:
        raise DataRejected(f"{shown(table)} is not CSV: {error}") from error
    return names, _csv_records(lines, names)


def _csv_records(lines: Any, names: list[str]) -> Iterator[tuple[str, Record]]:
    while True:
        try:
            values = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"row {lines.line_num}", f"is not CSV: {error}"
            return
        if not values:
            continue
        record: Record = dict(zip(names, values, strict=False))
        if len(values) != len(names):
            record = f"has {len(values)} fields, and the first row has {len(names)}"
        yield f"row {lines.line_num}", record


def _json_lines(text: str) -> Iterator[tuple[str, Record]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield f"row {number}", f"is not JSON: {error}"
            continue
        yield f"row {number}", found if isinstance(found, dict) else "is not an object of JSON"


def _row(where: str, record: Record, columns: Columns) -> Row:
    if isinstance(record, str):
        return Row(where=where, problem=record)
    file, label = record.get(columns.file), record.get(columns.label)
    split = record.get(columns.split) if columns.split else ""
    if not isinstance(file, str) or not file:
        return Row(where=where, problem=f"names no file in the column {columns.file!r}")
    if label is not None and (isinstance(label, bool) or not isinstance(label, str | int)):
        return Row(where=where, file=file, problem="has a label that is not text")
    named = "" if label is None else str(label)
    return Row(where=where, file=file, label=named, split=str(split or ""))
