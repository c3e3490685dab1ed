"""Read images and labels from parquet, as Hugging Face's `datasets` writes them.

Images are copied once, batch by batch, into a nameless file; memory holds one batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model_store.errors import DataRejected, ImageRejected, WrongUsage
from trainer.data.sources.members import MAX_FILE_BYTES, Member
from trainer.data.sources.place import Place, shown
from trainer.data.sources.rows import (
    WHOLE,
    Labelled,
    Parts,
    Problems,
    checked_label,
    grouped,
    part_named,
)
from trainer.data.sources.stored_bytes import CHUNK_BYTES, Part, StoredBytes

ROWS_A_BATCH = 64
IMAGES, LABELS = ("image", "img"), ("label", "labels")


@dataclass(frozen=True, slots=True)
class RowPicture:
    """The image of one row."""

    shown_as: str
    part: Part

    def __str__(self) -> str:
        return self.shown_as

    def read_bytes(self) -> bytes:
        return b"".join(self.part.chunks())


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of images and labels, and the names of labels that are numbers."""

    image: str
    label: str
    names: tuple[str, ...] | None


def list_parquet(files: Sequence[Place], *, source: Place) -> Parts:
    """List the rows of one or more files; `train-…` and `test-…` are parts of one whole."""
    stored, problems = StoredBytes.temporary(), Problems(source)
    good: list[Labelled] = []
    parts = {file: part_of(file) for file in files}
    split = all(part is not None for part in parts.values()) and len(set(parts.values())) > 1
    for file in files:
        part = (parts[file] or WHOLE) if split else WHOLE
        good += (replace(one, part=part) for one in _rows(file, stored, problems))
    problems.refuse_any()
    if not good:
        raise DataRejected(f"{shown(source)} has no rows")
    return grouped(good, table=source)


def part_of(file: Place) -> str | None:
    """Tell the part of a file: `train-00000-of-00002.parquet` is one of train."""
    return part_named(file.name.partition(".")[0].partition("-")[0].partition("_")[0])


def _rows(file: Place, stored: StoredBytes, problems: Problems) -> Iterator[Labelled]:
    with _opened(file) as table:
        schema = _schema(table.schema_arrow, file)
        columns = [schema.image, schema.label]
        for number, record in enumerate(_records(table, columns, file), start=1):
            try:
                yield _labelled(record, schema, stored, file=file, number=number)
            except ValueError as error:
                problems.add(f"row {number} of {shown(file.name)}", "", str(error))


def _records(table: Any, columns: list[str], file: Place) -> Iterator[dict[str, Any]]:
    import pyarrow

    try:
        for batch in table.iter_batches(ROWS_A_BATCH, columns=columns, use_threads=False):
            batch.validate(full=True)
            yield from batch.select(columns).to_pylist()
    except (pyarrow.ArrowException, ValueError, OSError, MemoryError) as error:
        raise DataRejected(f"{shown(file)} is damaged: {error}") from error


@contextmanager
def _opened(file: Place) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise WrongUsage(
            f"{shown(file)} is parquet, which pyarrow reads: pip install 'dne-serve[parquet]'"
        ) from error
    with _on_disk(file).reader() as reader:
        try:
            # Pages are read one by one, whatever the size of a group of rows.
            table = parquet.ParquetFile(reader, pre_buffer=False, buffer_size=CHUNK_BYTES)
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            raise DataRejected(f"{shown(file)} is not parquet that can be read: {error}") from error
        with table:
            yield table


def _on_disk(file: Place) -> StoredBytes:
    """Return a file that can be read at any place: a member of an archive is unpacked first."""
    if not isinstance(file, Member):
        return StoredBytes.of(Path(str(file)))
    stored = StoredBytes.temporary()
    try:
        for data in file.chunks():
            stored.append(data)
    except ImageRejected as error:
        raise DataRejected(f"{shown(file)} cannot be read: {error}") from error
    return stored


def _schema(schema: Any, file: Place) -> Schema:
    features = _features(schema.metadata or {})
    image = _chosen(schema, features, IMAGES, kind="Image")
    label = _chosen(schema, features, LABELS, kind="ClassLabel")
    if image is None or label is None:
        raise DataRejected(
            f"{shown(file)} has the columns {', '.join(map(repr, schema.names[:20]))}; it needs "
            "one of images, named `image`, and one of classes, named `label`"
        )
    names = features.get(label, {}).get("names")
    return Schema(image, label, tuple(map(str, names)) if isinstance(names, list) else None)


def _features(metadata: dict[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """Read the types of the columns that `datasets` adds to the schema."""
    try:
        found = json.loads(metadata.get(b"huggingface", b"{}"))
        features = found.get("info", {}).get("features", {})
        return {name: one for name, one in features.items() if isinstance(one, dict)}
    except (ValueError, AttributeError, RecursionError):
        return {}


def _chosen(
    schema: Any, features: dict[str, dict[str, Any]], names: Sequence[str], *, kind: str
) -> str | None:
    """Find a column by its name, or as the only one of its kind."""
    named = [name for name in names if name in schema.names]
    of_kind = [
        name for name, one in features.items() if one.get("_type") == kind and name in schema.names
    ]
    return named[0] if named else of_kind[0] if len(of_kind) == 1 else None


def _labelled(
    record: dict[str, Any], schema: Schema, stored: StoredBytes, *, file: Place, number: int
) -> Labelled:
    label = checked_label(_label(record[schema.label], schema))
    image = record[schema.image]
    data = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(data, bytes):
        raise ValueError("has no bytes of an image; write the data with its images embedded")
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"has an image of {len(data)} bytes; {MAX_FILE_BYTES} are the most")
    picture = RowPicture(f"{file.name}: row {number}", stored.append(data))
    return Labelled((file.name, number), label, WHOLE, picture)


def _label(value: Any, schema: Schema) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("has a label that is neither text nor a number")
    if schema.names is None:
        raise ValueError(
            f"has the number {value} as its label, and the file has no names for numbers: write "
            "labels as text"
        )
    if not 0 <= value < len(schema.names):
        raise ValueError(f"has the label {value}, and there are {len(schema.names)} names")
    return schema.names[value]
