"""Check the bytes of a shard before a tensor is built from them, without torch and numpy.

A shard is a safetensors file: 8 bytes of header length (little endian), a JSON header, the
tensors one after the other. Only the tensors that the manifest implies are let through.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from model_store.errors import KeptTooLarge, RecordInvalid, ShardCorrupt
from model_store.records.manifest import ClassImages, Draft, ShardKind, ShardRef
from model_store.spec import Shape, statistics_tensors

MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 10_000
FINITE_CHUNK_BYTES = 1 << 18  # stays in the processor's cache: twice as fast as all at once
ITEM_BYTES = {"F32": 4, "U8": 1, "I64": 8}


MAX_KEPT_BYTES = 64 << 20
"""The largest shard of a class's images that is read to show a few of them."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a shard: its dtype and shape, and the place of its bytes."""

    dtype: str
    shape: Shape
    start: int
    end: int


def shard_ref(kind: ShardKind, data: bytes) -> ShardRef:
    """Make the reference to a shard with these bytes."""
    return ShardRef(kind=kind, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


def expected_tensors(manifest: Draft, ref: ShardRef) -> Mapping[str, Shape] | None:
    """List the tensors that a shard must hold; None for images, which have no fixed shape."""
    if ref.sha256 == manifest.classifier.sha256:
        return manifest.spec.classifier_tensors()
    if manifest.doubt is not None and ref.sha256 == manifest.doubt.sha256:
        return manifest.spec.doubt_tensors()
    for index, expert in enumerate(manifest.experts):
        if ref.sha256 == expert.sha256:
            return manifest.spec.expert_tensors(index)
    for entry in manifest.statistics:
        if ref == entry.shard:
            width = manifest.spec.slice_width(0)
            return statistics_tensors(images=entry.count, width=width)
    return None


def check_digest(ref: ShardRef, data: bytes) -> None:
    """Raise ShardCorrupt unless size and SHA-256 are those of the reference."""
    if len(data) != ref.bytes:
        raise ShardCorrupt(ref.sha256, f"it has {len(data)} bytes instead of {ref.bytes}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != ref.sha256:
        raise ShardCorrupt(ref.sha256, f"its SHA-256 is {digest}")


def check_shard(ref: ShardRef, data: bytes, *, expected: Mapping[str, Shape] | None) -> None:
    """Raise ShardCorrupt unless names, dtypes, shapes and values fit a shard of this kind."""
    try:
        layout = read_layout(data)
        if ref.kind in ("memory", "held-out"):
            image_bounds(data, layout)
        else:
            _check_weights(data, layout, expected or {})
    except ValueError as error:
        raise ShardCorrupt(ref.sha256, str(error)) from error


def read_layout(data: bytes, *, item_bytes: Mapping[str, int] = ITEM_BYTES) -> dict[str, Stored]:
    """Read the tensors of a shard by name. Raise ValueError unless it is gapless safetensors."""
    if len(data) < 8:
        raise ValueError("it is too short to hold a header")
    (header_bytes,) = struct.unpack_from("<Q", data)
    if header_bytes > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"its header claims {header_bytes} bytes")
    layout: dict[str, Stored] = {}
    for name, entry in _header_entries(data[8 : 8 + header_bytes]):
        if name in layout:
            raise ValueError(f"tensor {name!r} is repeated")
        layout[name] = _stored(name, entry, payload=8 + header_bytes, item_bytes=item_bytes)
    position = 8 + header_bytes
    for stored in sorted(layout.values(), key=lambda item: (item.start, item.end)):
        if stored.start != position:
            raise ValueError("its tensors overlap or leave gaps")
        position = stored.end
    if position != len(data):
        raise ValueError("its tensors do not end where the file ends")
    return layout


def is_expert(data: bytes) -> bool:
    """Return whether a shard holds an expert, whatever its shapes are."""
    try:
        names = read_layout(data)
    except ValueError:
        return False
    return bool(names) and all(name.startswith("experts.") for name in names)


def image_bounds(data: bytes, layout: Mapping[str, Stored]) -> list[tuple[int, int]]:
    """Find begin and end of each encoded image. Raise ValueError for other shards."""
    dtypes = {name: (stored.dtype, len(stored.shape)) for name, stored in layout.items()}
    if dtypes != {"bytes": ("U8", 1), "offsets": ("I64", 1)}:
        raise ValueError("an image shard holds `bytes` (U8) and `offsets` (I64), and nothing else")
    content, table = layout["bytes"], layout["offsets"]
    offsets = struct.unpack_from(f"<{table.shape[0]}q", data, table.start)
    if not offsets or offsets[0] != 0 or offsets[-1] != content.shape[0]:
        raise ValueError("its offsets do not span its bytes")
    bounds = list(itertools.pairwise(offsets))
    if any(end <= start for start, end in bounds):
        raise ValueError("its offsets do not rise")
    return [(content.start + start, content.start + end) for start, end in bounds]


def decode_images(data: bytes, *, count: int) -> list[bytes]:
    """Return the first `count` encoded images of a checked shard."""
    bounds = image_bounds(data, read_layout(data))
    if count > len(bounds):
        raise RecordInvalid("the manifest", f"it names {count} images of a shard of {len(bounds)}")
    return [data[start:end] for start, end in bounds[:count]]


def read_kept(read: Callable[[ShardRef], bytes], entry: ClassImages) -> list[bytes]:
    """Read the kept images of a class. Raise KeptTooLarge where they are too large to be shown."""
    if entry.shard.bytes > MAX_KEPT_BYTES:
        raise KeptTooLarge(f"the kept images of {entry.class_name!r} are too large to be shown")
    data = read(entry.shard)
    check_shard(entry.shard, data, expected=None)
    return decode_images(data, count=entry.count)


def _header_entries(header: bytes) -> Iterator[tuple[str, Any]]:
    try:
        pairs = json.loads(header.decode(), object_pairs_hook=list)
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    if not isinstance(pairs, list) or len(pairs) > MAX_TENSORS:
        raise ValueError(f"its header is not an object of at most {MAX_TENSORS} tensors")
    for pair in pairs:
        if not isinstance(pair, tuple):
            raise ValueError("its header is not an object")
        if pair[0] != "__metadata__":
            yield pair


def _stored(name: str, entry: Any, *, payload: int, item_bytes: Mapping[str, int]) -> Stored:
    if not isinstance(entry, list) or not all(isinstance(pair, tuple) for pair in entry):
        raise ValueError(f"tensor {name!r} is not described by an object")
    fields = dict(entry)
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if len(entry) != 3 or not isinstance(dtype, str) or dtype not in item_bytes:
        raise ValueError(f"tensor {name!r} has no accepted dtype, shape and offsets")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has no accepted dtype, shape and offsets")
    start, end = offsets
    if end - start != math.prod(shape) * item_bytes[dtype]:
        raise ValueError(f"tensor {name!r} has a shape that does not fit its bytes")
    return Stored(dtype=dtype, shape=tuple(shape), start=payload + start, end=payload + end)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < 1 << 48 for size in value
    )


def _check_weights(
    data: bytes, layout: Mapping[str, Stored], expected: Mapping[str, Shape]
) -> None:
    if layout.keys() != expected.keys():
        odd = sorted(layout.keys() ^ expected.keys())[0]
        raise ValueError(f"tensor {odd!r} is missing or not expected")
    for name, stored in layout.items():
        if stored.dtype != "F32" or stored.shape != expected[name]:
            raise ValueError(
                f"tensor {name!r} is {stored.dtype} {list(stored.shape)} "
                f"instead of F32 {list(expected[name])}"
            )
    first = min((stored.start for stored in layout.values()), default=len(data))
    _check_finite(data, first)


def _check_finite(data: bytes, start: int) -> None:
    # A float32 is NaN or infinite only if its highest byte is 7f or ff. Weights that large do not
    # occur, so two fast byte searches settle it, and only a hit is looked at one by one.
    for first in range(start, len(data), FINITE_CHUNK_BYTES):
        end = first + FINITE_CHUNK_BYTES
        high_bytes = data[first + 3 : end : 4]
        if high_bytes.find(0x7F) < 0 and high_bytes.find(0xFF) < 0:
            continue
        if not math.isfinite(sum(memoryview(data)[first:end].cast("f"))):
            raise ValueError("it holds a value that is not finite")
