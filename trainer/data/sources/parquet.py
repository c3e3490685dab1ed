"""Read images and labels from parquet, as Hugging Face's `datasets` writes them.

Images are copied once, batch by batch, into a nameless file; memory holds one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model_store.errors import DataRejected, ImageRejected, WrongUsage
from trainer.data.sources import limits
from trainer.data.sources.archives import Member
from trainer.data.sources.limits import (
    CHUNK_BYTES,
    BoundedReader,
    FileSlice,
    StoredBytes,
    Unpacking,
    parse_table,
)
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

MAX_HEADER_BYTES = 1 << 16
"""Bytes of the header of a page. Statistics of large values are the most of it."""
_UNPACKED, _PACKED = 2, 3
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 0, 1, 2, 3, 7, 8, 12
_WHOLE_NUMBERS = (4, 5, 6)
_MAX_NESTED = 8


def _largest_page(stored: StoredBytes, metadata: Any, *, columns: set[str]) -> int:
    """Return the unpacked bytes of the largest page. Raise ValueError where a page is too large, or
    where pages are not where the metadata says."""
    chunks = [
        chunk
        for group in map(metadata.row_group, range(metadata.num_row_groups))
        for chunk in map(group.column, range(group.num_columns))
        if chunk.path_in_schema in columns
    ]
    if any(one.total_compressed_size < 0 for one in chunks) or stored.size < sum(
        one.total_compressed_size for one in chunks
    ):
        raise ValueError("its parts are larger than the file")
    return max((size for chunk in chunks for size in _page_sizes(stored, chunk)), default=0)


def _page_sizes(stored: StoredBytes, chunk: Any) -> Iterator[int]:
    at = chunk.data_page_offset
    if chunk.dictionary_page_offset:
        at = min(at, chunk.dictionary_page_offset)
    end = at + chunk.total_compressed_size
    while at < end:
        header = _Header(stored.read(at, MAX_HEADER_BYTES))
        fields = header.whole_numbers()
        unpacked, packed = fields.get(_UNPACKED, -1), fields.get(_PACKED, -1)
        if unpacked < 0 or packed < 0:
            raise ValueError("a page has no size")
        if max(unpacked, packed) > limits.MAX_PAGE_BYTES:
            raise ValueError(
                f"a page unpacks to {unpacked} bytes, and {limits.MAX_PAGE_BYTES} are the most: "
                "write it again with fewer rows in a group"
            )
        yield unpacked
        at += header.at + packed


class _Header:
    """A Thrift struct in the compact protocol. Every field but whole numbers is passed over."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def whole_numbers(self) -> dict[int, int]:
        """Read the struct to its end, and return its own whole numbers by their fields."""
        found: dict[int, int] = {}
        for field, kind in self._fields():
            if kind in _WHOLE_NUMBERS:
                found[field] = self._zigzag()
            else:
                self._skip(kind, nested=0)
        return found

    def _fields(self) -> Iterator[tuple[int, int]]:
        field = 0
        while (first := self._byte()) & 0x0F != _STOP:
            field = field + (first >> 4) if first >> 4 else self._zigzag()
            yield field, first & 0x0F

    def _skip(self, kind: int, *, nested: int) -> None:
        if nested > _MAX_NESTED:
            raise ValueError("the header of a page is nested too deeply")
        if kind in (_TRUE, _FALSE):
            return
        if kind in _WHOLE_NUMBERS:
            self._varint()
        elif kind == _STRUCT:
            for _, inner in self._fields():
                self._skip(inner, nested=nested + 1)
        elif kind in (_BYTE, _DOUBLE, _BINARY):
            self._pass({_BYTE: 1, _DOUBLE: 8}.get(kind) or self._varint())
        else:
            raise ValueError("the header of a page has a field that no page has")

    def _zigzag(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)

    def _varint(self) -> int:
        number, shift = 0, 0
        while True:
            byte = self._byte()
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number
            if shift > 63:
                raise ValueError("the header of a page has a number that is too long")

    def _byte(self) -> int:
        self._pass(1)
        return self._data[self.at - 1]

    def _pass(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise ValueError("the header of a page does not end")


_ROWS_A_BATCH = 64
_BATCH_BYTES = 1 << 27
"""Bytes of a batch. Rows may share one value, so each may be as large as the largest page."""
IMAGES, LABELS = ("image", "img"), ("label", "labels")


@dataclass(frozen=True, slots=True)
class _RowPicture:
    """The image of one row."""

    shown_as: str
    part: FileSlice

    def __str__(self) -> str:
        return self.shown_as

    def read_bytes(self) -> bytes:
        return b"".join(self.part.chunks())


@dataclass(frozen=True, slots=True)
class _Schema:
    """The columns of images and labels, and the names of labels that are numbers."""

    image: str
    label: str
    names: tuple[str, ...] | None


def list_parquet(files: Sequence[Place], *, source: Place) -> Parts:
    """List the rows of one or more files; `train-…` and `test-…` are parts of one whole."""
    stored, problems = StoredBytes.temporary(), Problems(source)
    unpacking = Unpacking(source, sum(file.stat().st_size for file in files))
    good: list[Labelled] = []
    parts = {file: part_of(file) for file in files}
    split = all(part is not None for part in parts.values()) and len(set(parts.values())) > 1
    for file in files:
        part = (parts[file] or WHOLE) if split else WHOLE
        rows = _rows(file, stored, problems, unpacking)
        good += (replace(row, part=part) for row in rows)
    problems.refuse_any()
    if not good:
        raise DataRejected(f"{shown(source)} has no rows")
    return grouped(good, table=source)


def part_of(file: Place) -> str | None:
    """Tell the part of a file: `train-00000-of-00002.parquet` is one of train."""
    return part_named(file.name.partition(".")[0].partition("-")[0].partition("_")[0])


def _rows(
    file: Place, stored: StoredBytes, problems: Problems, unpacking: Unpacking
) -> Iterator[Labelled]:
    with _opened(file) as (table, packed):
        schema = _schema(table.schema_arrow, file)
        leaves = _leaves(table, schema, file)
        for number, record in enumerate(_records(table, packed, leaves, file), start=1):
            unpacking.count_member()
            try:
                label, image = _label_and_image(record, schema)
            except ValueError as error:
                problems.add(f"row {number} of {shown(file.name)}", "", str(error))
                continue
            unpacking.count(len(image))
            picture = _RowPicture(f"{file.name}: row {number}", stored.append(image))
            yield Labelled((file.name, number), label, WHOLE, picture)


def _leaves(table: Any, schema: _Schema, file: Place) -> list[str]:
    """Name the columns of values that are read: one of images and one of labels."""
    flat = [column.path for column in table.schema if not column.max_repetition_level]
    image = next((one for one in (schema.image, f"{schema.image}.bytes") if one in flat), None)
    if image is None or schema.label not in flat:
        raise DataRejected(
            f"{shown(file)} has no bytes of images, or no plain labels: write it with one image "
            "and one class a row, and with the images embedded"
        )
    return [image, schema.label]


def _records(
    table: Any, packed: StoredBytes, leaves: list[str], file: Place
) -> Iterator[dict[str, Any]]:
    import pyarrow

    try:
        largest = _largest_page(packed, table.metadata, columns=set(leaves))
        rows = max(1, min(_ROWS_A_BATCH, _BATCH_BYTES // max(1, largest)))
        for batch in table.iter_batches(rows, columns=leaves, use_threads=False):
            batch.validate(full=True)
            for row in range(batch.num_rows):
                yield {name: batch.column(name)[row].as_py() for name in batch.schema.names}
    except (pyarrow.ArrowException, ValueError, OSError, MemoryError) as error:
        raise DataRejected(f"{shown(file)} is damaged: {error}") from error


@contextmanager
def _opened(file: Place) -> Iterator[tuple[Any, StoredBytes]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise WrongUsage(
            f"{shown(file)} is parquet, which pyarrow reads: pip install 'dne-serve[parquet]'"
        ) from error
    stored = _on_disk(file)
    with stored.reader(BoundedReader) as reader:
        try:
            # Pages are read one by one, whatever the size of a group of rows.
            table = parquet.ParquetFile(reader, pre_buffer=False, buffer_size=CHUNK_BYTES)
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            raise DataRejected(f"{shown(file)} is not parquet that can be read: {error}") from error
        with table:
            yield table, stored


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


def _schema(schema: Any, file: Place) -> _Schema:
    features = _features(schema.metadata or {})
    image = _chosen(schema, features, IMAGES, kind="Image")
    label = _chosen(schema, features, LABELS, kind="ClassLabel")
    if image is None or label is None:
        raise DataRejected(
            f"{shown(file)} has the columns {', '.join(map(repr, schema.names[:20]))}; it needs "
            "one of images, named `image`, and one of classes, named `label`"
        )
    names = features.get(label, {}).get("names")
    return _Schema(image, label, tuple(map(str, names)) if isinstance(names, list) else None)


def _features(metadata: dict[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """Read the types of the columns that `datasets` adds to the schema."""
    try:
        found = parse_table(metadata.get(b"huggingface", b"{}"))
        features = found.get("info", {}).get("features", {})
        return {name: one for name, one in features.items() if isinstance(one, dict)}
    except (ValueError, AttributeError):
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


def _label_and_image(record: dict[str, Any], schema: _Schema) -> tuple[str, bytes]:
    label = checked_label(_label(record[schema.label], schema))
    image = record[schema.image]
    data = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(data, bytes):
        raise ValueError("has no bytes of an image; write the data with its images embedded")
    if len(data) > limits.MAX_FILE_BYTES:
        raise ValueError(
            f"has an image of {len(data)} bytes; at most {limits.MAX_FILE_BYTES} are read"
        )
    return label, data


def _label(value: Any, schema: _Schema) -> str:
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
