"""Read labels from JSON that annotation tools export: COCO, FiftyOne, Datumaro."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from model_store.errors import DataRejected
from trainer.data.limits import parse_table
from trainer.data.sources.place import MAX_DEPTH, Place, folders_in, images_in, shown
from trainer.data.sources.rows import Parts, Row, list_rows, read_table

IMAGE_FOLDERS = ("data", "images")


def list_export(table: Place, *, root: Place | None = None, subset: str = "") -> Parts:
    """List the images of an export below `root`, which is the file's own folder unless given."""
    root = root or table.parent
    document = _document(table)
    bases = [root.joinpath(name, one) for name in IMAGE_FOLDERS for one in (subset, "default")]
    bases = [root, *(root.joinpath(name) for name in IMAGE_FOLDERS), *bases]
    try:
        rows = list(_rows(document, root, table))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataRejected(
            f"{shown(table)} is not as its kind of export is: {type(error).__name__}: {error}"
        ) from error
    return list_rows(rows, table=table, bases=bases)


def _document(table: Place) -> Any:
    try:
        return parse_table(read_table(table))
    except ValueError as error:
        raise DataRejected(f"{shown(table)} is not JSON that can be read: {error}") from error


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
        yield _row(f"image {number}", str(image["file_name"]), labels)
    for image_id in found:
        yield Row(where=f"image id {image_id!r}", problem="is annotated, and is not listed")


def _row(where: str, file: str, labels: list[str]) -> Row:
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
            yield _row(where, named[0], _fiftyone_labels(value, classes))
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
        yield _row(f"item {number}", str(file), labels)


def _files_below(folder: Place, *, above: str = "", depth: int = 0) -> Iterator[str]:
    if not folder.is_dir() or depth > MAX_DEPTH:
        return
    yield from (f"{above}{one.name}" for one in images_in(folder)[0] if isinstance(one.name, str))
    for inner in folders_in(folder):
        yield from _files_below(inner, above=f"{above}{inner.name}/", depth=depth + 1)
