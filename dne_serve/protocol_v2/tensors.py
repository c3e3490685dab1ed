"""Decode the tensors of a request and encode those of an answer. Knows nothing of images."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dne_serve.errors import Malformed
from dne_serve.protocol_v2.schemas import Datatype

PREFIX_BYTES = 4
"""Before each element of a BYTES tensor stands its length, little-endian."""
ITEM_BYTES = {"BYTES": PREFIX_BYTES, "UINT8": 1, "FP32": 4}
"""Size of one element; for BYTES, the least size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor as it was sent: `binary` or `data` holds the values, which are not checked yet."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    binary: memoryview | None
    data: list[Any] | None

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A tensor of an answer: numbers, or texts in row-major order."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    values: NDArray[Any] | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An output as it travels: either `data` or `binary` is None."""

    data: list[Any] | None
    binary: bytes | None


def check_size(tensor: Tensor) -> None:
    """Refuse values that cannot fill the shape, before they are decoded."""
    if tensor.binary is None:
        found = len(tensor.data or [])
        if found != tensor.shape[0]:  # else it may be nested, and is counted when it is flattened
            _check_count(tensor, found)
        return
    each = ITEM_BYTES[tensor.datatype]
    needed, sent = tensor.count * each, len(tensor.binary)
    if sent < needed or (sent > needed and tensor.datatype != "BYTES"):
        at_least = "at least " if tensor.datatype == "BYTES" else ""
        raise Malformed(
            f"input {tensor.name!r}: {tensor.datatype} {list(tensor.shape)} takes {at_least}"
            f"{needed} bytes, and {sent} were sent"
        )


def uint8_of(tensor: Tensor) -> NDArray[np.uint8]:
    if tensor.binary is not None:
        return np.frombuffer(tensor.binary, dtype=np.uint8).reshape(tensor.shape)
    values = _from_json(tensor)
    with np.errstate(invalid="ignore"):
        fits = (values == np.rint(values)) & (values >= 0) & (values <= 255)
    if not fits.all():
        raise Malformed(f"input {tensor.name!r}: a UINT8 is a whole number from 0 to 255")
    return values.astype(np.uint8)


def floats_of(tensor: Tensor) -> NDArray[np.floating[Any]]:
    """Decode floats, also infinite ones and NaN."""
    if tensor.binary is not None:
        return np.frombuffer(tensor.binary, dtype="<f4").reshape(tensor.shape)
    return _from_json(tensor)


def elements_of(tensor: Tensor) -> list[bytes] | list[str]:
    """Split a BYTES tensor: into bytes if it is binary, into texts if it is JSON."""
    if tensor.binary is not None:
        return _split(tensor, tensor.binary)
    texts = _flat(tensor)
    if not all(type(text) is str for text in texts):
        raise Malformed(f"input {tensor.name!r}: the data of a BYTES tensor in JSON are strings")
    return texts


def encode(output: Output, *, binary: bool) -> Encoded:
    values = output.values
    if isinstance(values, np.ndarray):
        if binary:
            return Encoded(
                data=None, binary=values.astype(values.dtype.newbyteorder("<")).tobytes()
            )
        return Encoded(data=values.ravel().tolist(), binary=None)
    if not binary:
        return Encoded(data=list(values), binary=None)
    elements = [text.encode() for text in values]
    prefixed = [struct.pack("<I", len(element)) + element for element in elements]
    return Encoded(data=None, binary=b"".join(prefixed))


def _from_json(tensor: Tensor) -> NDArray[np.float64]:
    numbers = _flat(tensor)
    if not set(map(type, numbers)) <= {int, float}:
        raise Malformed(f"input {tensor.name!r}: the data of a {tensor.datatype} are numbers")
    try:
        values = np.array(numbers, dtype=np.float64)
    except OverflowError as error:
        raise Malformed(f"input {tensor.name!r}: a number is too large") from error
    return values.reshape(tensor.shape)


def _flat(tensor: Tensor) -> list[Any]:
    """List the values of `data` in row-major order. `data` is flat, or nested like the shape."""
    data = tensor.data if tensor.data is not None else []
    if not any(isinstance(item, list) for item in data):
        _check_count(tensor, len(data))
        return data
    lists: list[Any] = [data]
    for size in tensor.shape:
        if not all(isinstance(one, list) and len(one) == size for one in lists):
            raise Malformed(
                f"input {tensor.name!r}: data is neither flat nor nested like {list(tensor.shape)}"
            )
        lists = list(chain.from_iterable(lists))
    return lists


def _split(tensor: Tensor, binary: memoryview) -> list[bytes]:
    elements = []
    at = 0
    for _ in range(tensor.count):
        start = at + PREFIX_BYTES
        at = start + int.from_bytes(binary[at:start], "little")
        if at > len(binary):
            raise Malformed(f"input {tensor.name!r}: an element is longer than what was sent")
        elements.append(bytes(binary[start:at]))
    if at != len(binary):
        raise Malformed(f"input {tensor.name!r}: more was sent than {tensor.count} elements")
    return elements


def _check_count(tensor: Tensor, found: int) -> None:
    if found != tensor.count:
        raise Malformed(
            f"input {tensor.name!r}: {list(tensor.shape)} takes {tensor.count} values, and {found} "
            "were sent"
        )
