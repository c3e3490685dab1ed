"""Decode the tensors of a request, turn them into images, and encode the tensors of an answer.

Every input becomes 8-bit RGB pixels, because the network was trained on these.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dne_serve.errors import Malformed, TooLarge
from dne_serve.inference.decoding import Decoder, EncodedImage, Picture
from dne_serve.protocol_v2.schemas import Datatype
from model_store.preprocess import FORMATS, Pixels
from model_store.records.manifest import Preprocessing

_PREFIX_BYTES = 4
"""Before each element of a BYTES tensor stands its length, little-endian."""
ITEM_BYTES = {"BYTES": _PREFIX_BYTES, "UINT8": 1, "FP32": 4}
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
        sent = len(tensor.data or [])
        if sent != tensor.shape[0]:  # else it may be nested, and is counted when it is flattened
            _check_count(tensor, sent)
        return
    each = ITEM_BYTES[tensor.datatype]
    needed, sent = tensor.count * each, len(tensor.binary)
    if sent < needed or (sent > needed and tensor.datatype != "BYTES"):
        at_least = "at least " if tensor.datatype == "BYTES" else ""
        raise Malformed(
            f"input {tensor.name!r}: {tensor.datatype} {list(tensor.shape)} takes {at_least}"
            f"{needed} bytes, and {sent} were sent"
        )


def _floats_of(tensor: Tensor) -> NDArray[np.floating[Any]]:
    """Decode floats, also infinite ones and NaN."""
    if tensor.binary is not None:
        return np.frombuffer(tensor.binary, dtype="<f4").reshape(tensor.shape)
    return _from_json(tensor)


def _elements_of(tensor: Tensor) -> list[bytes] | list[str]:
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
        if not all(isinstance(part, list) and len(part) == size for part in lists):
            raise Malformed(
                f"input {tensor.name!r}: data is neither flat nor nested like {list(tensor.shape)}"
            )
        lists = list(chain.from_iterable(lists))
    return lists


def _split(tensor: Tensor, binary: memoryview) -> list[bytes]:
    elements = []
    at = 0
    for _ in range(tensor.count):
        start = at + _PREFIX_BYTES
        at = start + int.from_bytes(binary[at:start], "little")
        if at > len(binary):
            raise Malformed(f"input {tensor.name!r}: an element is longer than what was sent")
        elements.append(bytes(binary[start:at]))
    if at != len(binary):
        raise Malformed(f"input {tensor.name!r}: more was sent than {tensor.count} elements")
    return elements


def _check_count(tensor: Tensor, sent: int) -> None:
    if sent != tensor.count:
        raise Malformed(
            f"input {tensor.name!r}: {list(tensor.shape)} takes {tensor.count} values, and {sent} "
            "were sent"
        )


ANY = -1
CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _PixelImage:
    """An image that came as pixels [H, W, 3]."""

    filename: str | None
    pixels: Pixels

    async def read(self, decoder: Decoder, preprocessing: Preprocessing) -> Pixels:
        return await decoder.fit(self.pixels, preprocessing)


class Input(ABC):
    """One way to send images. A request takes exactly one of them."""

    name: ClassVar[str]
    datatype: ClassVar[Datatype]

    @abstractmethod
    def shape(self, preprocessing: Preprocessing) -> tuple[int, ...]:
        """Return the shape for the metadata; ANY stands for any size from 1."""

    @abstractmethod
    def content(self, preprocessing: Preprocessing) -> str:
        """Describe the values in a sentence."""

    @abstractmethod
    def pictures(self, tensor: Tensor, preprocessing: Preprocessing) -> list[Picture]:
        """Return the images of a tensor whose shape and size were checked."""

    def accepts(self, shape: Sequence[int], preprocessing: Preprocessing) -> bool:
        wanted = self.shape(preprocessing)
        return len(shape) == len(wanted) and all(
            size >= 1 and want in (ANY, size) for size, want in zip(shape, wanted, strict=True)
        )


class _EncodedImages(Input):
    name = "image"
    datatype = "BYTES"

    def shape(self, preprocessing: Preprocessing) -> tuple[int, ...]:
        return (ANY,)

    def content(self, preprocessing: Preprocessing) -> str:
        return (
            f"image files of any size ({', '.join(FORMATS)}); in JSON as base64; [N, 1] is "
            "accepted too"
        )

    def accepts(self, shape: Sequence[int], preprocessing: Preprocessing) -> bool:
        return shape[0] >= 1 and tuple(shape[1:]) in ((), (1,))

    def pictures(self, tensor: Tensor, preprocessing: Preprocessing) -> list[Picture]:
        return [
            EncodedImage(filename=None, data=_decoded(sent) if isinstance(sent, str) else sent)
            for sent in _elements_of(tensor)
        ]


class _UInt8Pixels(Input):
    name = "pixels"
    datatype = "UINT8"

    def shape(self, preprocessing: Preprocessing) -> tuple[int, ...]:
        return (ANY, ANY, ANY, CHANNELS)

    def content(self, preprocessing: Preprocessing) -> str:
        return (
            "RGB pixels from 0 to 255, height before width; the middle square is scaled to "
            f"{preprocessing.image_size}×{preprocessing.image_size}"
        )

    def pictures(self, tensor: Tensor, preprocessing: Preprocessing) -> list[Picture]:
        if tensor.binary is not None:
            return _images(np.frombuffer(tensor.binary, dtype=np.uint8).reshape(tensor.shape))
        values = _from_json(tensor)
        with np.errstate(invalid="ignore"):
            fits = (values == np.rint(values)) & (values >= 0) & (values <= 255)
        if not fits.all():
            raise Malformed(f"input {tensor.name!r}: a UINT8 is a whole number from 0 to 255")
        return _images(values.astype(np.uint8))


class _FloatPixels(Input):
    name = "pixels_fp32"
    datatype = "FP32"

    def shape(self, preprocessing: Preprocessing) -> tuple[int, ...]:
        return (ANY, ANY, ANY, CHANNELS)

    def content(self, preprocessing: Preprocessing) -> str:
        return "as pixels, divided by 255: from 0 to 1, rounded to the nearest of 256 levels"

    def pictures(self, tensor: Tensor, preprocessing: Preprocessing) -> list[Picture]:
        return _images(_levels(_floats_of(tensor), of=self, preprocessing=preprocessing))


class _NormalisedPixels(Input):
    name = "normalised"
    datatype = "FP32"

    def shape(self, preprocessing: Preprocessing) -> tuple[int, ...]:
        return (ANY, CHANNELS, preprocessing.image_size, preprocessing.image_size)

    def content(self, preprocessing: Preprocessing) -> str:
        return (
            "what the network reads: (pixel / 255 - mean) / std with mean "
            f"{list(preprocessing.mean)} and std {list(preprocessing.std)}, rounded to the nearest "
            "of 256 levels"
        )

    def pictures(self, tensor: Tensor, preprocessing: Preprocessing) -> list[Picture]:
        values_NHWC = _floats_of(tensor).transpose(0, 2, 3, 1)
        with np.errstate(over="ignore", invalid="ignore"):  # `_levels` refuses infinities
            unit = values_NHWC * np.array(preprocessing.std) + np.array(preprocessing.mean)
        return _images(_levels(unit, of=self, preprocessing=preprocessing))


INPUTS: dict[str, Input] = {
    kind.name: kind
    for kind in (_EncodedImages(), _UInt8Pixels(), _FloatPixels(), _NormalisedPixels())
}


def pictures_of(
    tensors: Sequence[Tensor], *, preprocessing: Preprocessing, max_images: int
) -> list[Picture]:
    """Return the images of a request's one input, in order."""
    names = [tensor.name for tensor in tensors]
    given = INPUTS.get(names[0]) if len(names) == 1 else None
    if given is None:
        raise Malformed(f"exactly one of the inputs {', '.join(INPUTS)} is needed")
    [tensor] = tensors
    wanted = given.shape(preprocessing)
    if tensor.datatype != given.datatype or not given.accepts(tensor.shape, preprocessing):
        raise Malformed(
            f"input {given.name!r} must be {given.datatype} {list(wanted)}, where {ANY} is any "
            f"size but 0, and is {tensor.datatype[:16]} {list(tensor.shape)}"
        )
    check_size(tensor)
    if tensor.shape[0] > max_images:
        raise TooLarge(f"more than {max_images} images in one request")
    return given.pictures(tensor, preprocessing)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Malformed("an image in JSON is base64, and this one is not") from error


def _images(pixels_NHWC: Pixels) -> list[Picture]:
    return [_PixelImage(filename=None, pixels=pixels_HWC) for pixels_HWC in pixels_NHWC]


def _levels(
    unit: NDArray[np.floating[Any]], *, of: Input, preprocessing: Preprocessing
) -> NDArray[np.uint8]:
    """Scale 0…1 to 0…255. Allow half a level beyond, for rounding; more is another scale."""
    with np.errstate(over="ignore", invalid="ignore"):
        levels = unit * 255
        fits = bool((levels >= -0.5).all() and (levels <= 255.5).all())  # NaN is neither
    if not fits:
        raise Malformed(
            f"input {of.name!r} has values out of range or not finite; it holds "
            f"{of.content(preprocessing)}"
        )
    return np.asarray(np.clip(np.rint(levels), 0, 255), dtype=np.uint8)
