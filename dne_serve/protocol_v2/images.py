"""Turn the tensors of a request into images.

Every input becomes 8-bit RGB pixels, because the network was trained on these.
"""

from __future__ import annotations

import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dne_serve.errors import Malformed, TooLarge
from dne_serve.http.uploads import Upload
from dne_serve.inference.decoding import Decoder, Picture
from dne_serve.protocol_v2.schemas import Datatype
from dne_serve.protocol_v2.tensors import Tensor, check_size, elements_of, floats_of, uint8_of
from model_store.preprocess import FORMATS, Pixels
from model_store.records.manifest import Preprocessing

ANY = -1
CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelImage:
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


class EncodedImages(Input):
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
            Upload(filename=None, data=_decoded(one) if isinstance(one, str) else one)
            for one in elements_of(tensor)
        ]


class UInt8Pixels(Input):
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
        return _images(uint8_of(tensor))


class FloatPixels(Input):
    name = "pixels_fp32"
    datatype = "FP32"

    def shape(self, preprocessing: Preprocessing) -> tuple[int, ...]:
        return (ANY, ANY, ANY, CHANNELS)

    def content(self, preprocessing: Preprocessing) -> str:
        return "as pixels, divided by 255: from 0 to 1, rounded to the nearest of 256 levels"

    def pictures(self, tensor: Tensor, preprocessing: Preprocessing) -> list[Picture]:
        return _images(_levels(floats_of(tensor), of=self, preprocessing=preprocessing))


class NormalisedPixels(Input):
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
        values_NHWC = floats_of(tensor).transpose(0, 2, 3, 1)
        with np.errstate(over="ignore", invalid="ignore"):  # `_levels` refuses infinities
            unit = values_NHWC * np.array(preprocessing.std) + np.array(preprocessing.mean)
        return _images(_levels(unit, of=self, preprocessing=preprocessing))


INPUTS: dict[str, Input] = {
    one.name: one for one in (EncodedImages(), UInt8Pixels(), FloatPixels(), NormalisedPixels())
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
    return [PixelImage(filename=None, pixels=one) for one in pixels_NHWC]


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
