"""Read rows from CSV, JSONL, and JSON that annotation tools export: COCO, FiftyOne, Datumaro."""

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
from trainer.data.sources import limits
from trainer.data.sources.limits import Unpacking, parse_table
from trainer.data.sources.place import JSONL, MAX_DEPTH, Place, folders_in, images_in, shown
from trainer.data.sources.rows import Parts, Row, list_rows, read_table

FILE = ("file", "file_name", "filename", "path", "image")
LABEL = ("label", "class", "category")
_SPLIT = ("split", "subset")
_GROUP = ("group",)
_DELIMITERS = ",;\t"


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
            next((by_name[known_name] for known_name in known if known_name in by_name), None)
            for known in (FILE, LABEL, _SPLIT, _GROUP)
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
    delimiter = next((one for one in _DELIMITERS if one in header), ",")
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


IMAGE_FOLDERS = ("data", "images")


def list_export(table: Place, *, root: Place | None = None, subset: str = "") -> Parts:
    """List the images of an export below `root`, which is the file's own folder unless given."""
    root = root or table.parent
    try:
        document = parse_table(read_table(table))
    except ValueError as error:
        raise DataRejected(f"{shown(table)} is not JSON that can be read: {error}") from error
    bases = [root.joinpath(name, one) for name in IMAGE_FOLDERS for one in (subset, "default")]
    bases = [root, *(root.joinpath(name) for name in IMAGE_FOLDERS), *bases]
    try:
        rows = list(_rows(document, root, table))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataRejected(
            f"{shown(table)} is not as its kind of export is: {type(error).__name__}: {error}"
        ) from error
    return list_rows(rows, table=table, bases=bases)


def _rows(document: Any, root: Place, table: Place) -> Iterator[Row]:
    keys = set(document) if isinstance(document, dict) else set()
    if {"images", "annotations", "categories"} <= keys:
        return _coco(document)
    if {"classes", "labels"} <= keys and isinstance(document["labels"], dict):
        return _fiftyone(document, root.joinpath("data"))
    if {"items", "categories"} <= keys:
        return _datumaro(document)
    raise DataRejected(
        f"{shown(table)} is none of the JSON exports that are read: COCO has `images`, "
        "`annotations` and `categories`, FiftyOne `classes` and `labels`, Datumaro `items` and "
        "`categories`; a table of files and labels is CSV or JSONL"
    )


def _coco(document: Mapping[str, Any]) -> Iterator[Row]:
    names = {one["id"]: one["name"] for one in document["categories"]}
    found: dict[Any, dict[str, None]] = {}
    for number, one in enumerate(document["annotations"], start=1):
        if one.get("category_id") not in names:
            yield Row(where=f"annotation {number}", problem="has a category that is not listed")
            continue
        found.setdefault(one["image_id"], {})[str(names[one["category_id"]])] = None
    for number, image in enumerate(document["images"], start=1):
        labels = list(found.pop(image["id"], {}))
        yield _export_row(f"image {number}", str(image["file_name"]), labels)
    for image_id in found:
        yield Row(where=f"image id {image_id!r}", problem="is annotated, and is not listed")


def _export_row(where: str, file: str, labels: list[str]) -> Row:
    if len(labels) > 1:
        return Row(
            where=where,
            file=file,
            problem=f"is {' and '.join(map(repr, labels[:5]))}: an image has one class",
        )
    return Row(where=where, file=file, label=labels[0] if labels else "")


def _fiftyone(document: Mapping[str, Any], data: Place) -> Iterator[Row]:
    files = dict[str, list[str]]()
    for name in _files_below(data):
        files.setdefault(name.rpartition(".")[0] or name, []).append(name)
        files.setdefault(name, []).append(name)
    classes = document["classes"] or []
    for number, (key, value) in enumerate(document["labels"].items(), start=1):
        where, named = f"label {number}", list(dict.fromkeys(files.get(key, [key])))
        if len(named) > 1:
            problem = f"is the name of several files: {', '.join(map(repr, named[:5]))}"
            yield Row(where=where, file=key, problem=problem)
            continue
        try:
            yield _export_row(where, named[0], _fiftyone_labels(value, classes))
        except (IndexError, TypeError, KeyError):
            problem = "has a label that is not among `classes`"
            yield Row(where=where, file=key, problem=problem)


def _fiftyone_labels(value: Any, classes: list[str]) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list):
        return [name for one in value for name in _fiftyone_labels(one, classes)]
    if isinstance(value, dict):
        return _fiftyone_labels(value["label"], classes)
    if isinstance(value, int) and not isinstance(value, bool):
        return [str(classes[value if value >= 0 else len(classes)])]
    if isinstance(value, str):
        return [value]
    raise TypeError(value)


def _datumaro(document: Mapping[str, Any]) -> Iterator[Row]:
    names = [one["name"] for one in document["categories"]["label"]["labels"]]
    for number, item in enumerate(document["items"], start=1):
        numbers = [one["label_id"] for one in item["annotations"] if one["type"] == "label"]
        file = (item.get("image") or item.get("media") or {}).get("path") or item["id"]
        if any(not 0 <= one < len(names) for one in numbers):
            problem = "has a label that is not listed"
            yield Row(where=f"item {number}", file=str(file), problem=problem)
            continue
        labels = [str(names[one]) for one in dict.fromkeys(numbers)]
        yield _export_row(f"item {number}", str(file), labels)


def _files_below(folder: Place, *, above: str = "", depth: int = 0) -> Iterator[str]:
    if not folder.is_dir() or depth > MAX_DEPTH:
        return
    yield from (
        f"{above}{image.name}" for image in images_in(folder)[0] if isinstance(image.name, str)
    )
    for inner in folders_in(folder):
        yield from _files_below(inner, above=f"{above}{inner.name}/", depth=depth + 1)
