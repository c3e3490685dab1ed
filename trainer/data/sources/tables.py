"""Read rows from CSV and JSONL: a file, its label, and perhaps its part."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_store.errors import DataRejected
from model_store.received import memory_for_json
from model_store.tables import size
from trainer.data import limits
from trainer.data.limits import Unpacking, parse_table
from trainer.data.sources.place import JSONL, Place, shown
from trainer.data.sources.rows import Parts, Row, list_rows, read_table

FILE = ("file", "file_name", "filename", "path", "image")
LABEL = ("label", "class", "category")
SPLIT = ("split", "subset")
GROUP = ("group",)
DELIMITERS = ",;\t"


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that are used, each the first of its names that the table has."""

    file: str
    label: str
    split: str | None
    group: str | None
    unused: tuple[str, ...]

    @classmethod
    def among(cls, names: Sequence[str]) -> Columns | None:
        by_name = {name.strip().lower(): name for name in names}
        file, label, split, group = (
            next((by_name[one] for one in known if one in by_name), None)
            for known in (FILE, LABEL, SPLIT, GROUP)
        )
        if file is None or label is None:
            return None
        unused = tuple(name for name in names if name not in (file, label, split, group))
        return cls(file, label, split, group, unused)


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
    """Return whether a table has columns for files and labels."""
    return Columns.among(_opened(table)[0]) is not None


Record = Mapping[str, Any] | str
"""The fields of a row, or the reason why it has none."""


def _opened(table: Place) -> tuple[list[str], Iterable[tuple[str, Record]]]:
    data = read_table(table)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataRejected(f"{shown(table)} is not UTF-8 in row {line}") from error
    if table.suffix.lower() in JSONL:
        if memory_for_json(data) > limits.MAX_MEMORY:
            raise DataRejected(
                f"{shown(table)} would take more than {size(limits.MAX_MEMORY)} of memory: leave "
                "out all but the file, the label and the part, or give the data in parts"
            )
        records = list(_json_lines(data.removeprefix(codecs.BOM_UTF8), table))
        first = next((one for _, one in records if not isinstance(one, str)), None)
        if records and first is None:
            raise DataRejected(
                f"{shown(table)} has no row that can be read: {' '.join(map(str, records[0]))}"
            )
        return list(first or ()), records
    return _csv(data, table)


def _csv(data: bytes, table: Place) -> tuple[list[str], Iterable[tuple[str, Record]]]:
    header = data.partition(b"\n")[0][: limits.MAX_ROW_BYTES].decode(errors="ignore")
    delimiter = next((one for one in DELIMITERS if one in header), ",")
    text = _Lines(data)
    lines = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        names = next(lines, [])
    except csv.Error as error:
        raise DataRejected(f"{shown(table)} is not CSV: {error}") from error
    return names, _csv_records(lines, names, text)


class _Lines(Iterator[str]):
    """The lines of a CSV, decoded one by one: as one text, a single emoji makes every character
    take four bytes. Refuse a row that is too long, on one line or on many."""

    def __init__(self, data: bytes) -> None:
        self._text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig", newline="")
        self.row_length = 0

    def __next__(self) -> str:
        line = self._text.readline(limits.MAX_ROW_BYTES + 1)
        self.row_length += len(line)
        if self.row_length > limits.MAX_ROW_BYTES:
            raise csv.Error(f"a row has more than {size(limits.MAX_ROW_BYTES)}")
        if not line:
            raise StopIteration
        return line


def _csv_records(lines: Any, names: list[str], text: _Lines) -> Iterator[tuple[str, Record]]:
    while True:
        text.row_length = 0
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


def _json_lines(data: bytes, table: Place) -> Iterator[tuple[str, Record]]:
    unpacking = Unpacking(table, limits.MAX_UNPACKED_BYTES)
    for number, line in enumerate(io.BytesIO(data), start=1):
        unpacking.count_member()
        if not line.strip():
            continue
        try:
            found = parse_table(line)
        except ValueError as error:
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
    group = record.get(columns.group) if columns.group else None
    if group is not None and (isinstance(group, bool) or not isinstance(group, str | int)):
        return Row(where=where, file=file, problem="has a group that is not text")
    said = "" if group is None else str(group).strip()
    return Row(where=where, file=file, label=named, split=str(split or ""), group=said)
