"""Turn what a caller has into bytes to send: paths, bytes, open files, PIL images, numpy arrays."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from dne_client.errors import BadInput

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image

    Buffer: TypeAlias = bytes | bytearray | memoryview
    Image: TypeAlias = (
        str | os.PathLike[str] | Buffer | BinaryIO | PIL.Image.Image | np.ndarray[Any, Any]
    )
else:
    Image: TypeAlias = Any

GROUP_IMAGES = 16
"""Images of one request at most: the server computes batches of as many."""
GROUP_BYTES = 8 << 20
"""Bytes of one request, unless one image alone has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    filename: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An image of many: its place, its name, and its bytes or the reason why there are none."""

    place: int
    name: str
    upload: ImageFile | None
    error: BadInput | None = None


def read_upload(image: Image, *, name: str = "image") -> ImageFile:
    """Read an image. A string is a path. `name` stands for images that have none."""
    if isinstance(image, str | os.PathLike):
        return _read_file(Path(image))
    if isinstance(image, bytes | bytearray | memoryview):
        return ImageFile(filename=name, data=bytes(image))
    if hasattr(image, "read"):
        return ImageFile(filename=str(getattr(image, "name", name)), data=_bytes_of(image))
    return ImageFile(filename=name, data=_encoded(image))


def name_of(image: Image, *, place: int) -> str:
    """Name an image of many for people."""
    return str(image) if isinstance(image, str | os.PathLike) else f"image {place + 1}"


def placed(images: Iterable[Image]) -> Iterator[Placed]:
    """Read images one by one. An image that cannot be read does not end the others."""
    for place, image in enumerate(images):
        name = name_of(image, place=place)
        try:
            yield Placed(place=place, name=name, upload=read_upload(image, name=name))
        except BadInput as error:
            yield Placed(place=place, name=name, upload=None, error=error)


def grouped(
    images: Iterable[Placed], *, most: int = GROUP_IMAGES, most_bytes: int = GROUP_BYTES
) -> Iterator[list[Placed]]:
    """Put images together to requests, in order."""
    group: list[Placed] = []
    size = 0
    for image in images:
        more = len(image.upload.data) if image.upload else 0
        if group and (len(group) == most or size + more > most_bytes):
            yield group
            group, size = [], 0
        group.append(image)
        size += more
    if group:
        yield group


def _read_file(path: Path) -> ImageFile:
    try:
        return ImageFile(filename=path.name, data=path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from error


def _bytes_of(file: Any) -> bytes:
    data = file.read()
    if not isinstance(data, bytes):
        raise BadInput("an open file must be opened for bytes: open(path, 'rb')")
    return data


def _encoded(image: Any) -> bytes:
    """Encode a PIL image or a numpy array as PNG, which loses nothing."""
    try:
        import PIL.Image
    except ImportError as error:
        raise BadInput("PIL images and numpy arrays need Pillow: pip install pillow") from error
    if not isinstance(image, PIL.Image.Image):
        image = PIL.Image.fromarray(_checked(image))
    if image.mode not in {"1", "L", "LA", "I;16", "P", "RGB", "RGBA"}:
        image = image.convert("RGB")
    written = io.BytesIO()
    image.save(written, format="PNG", compress_level=1)
    return written.getvalue()


def _checked(array: Any) -> Any:
    shape, kind = getattr(array, "shape", None), str(getattr(array, "dtype", ""))
    if shape is None:
        raise BadInput(
            f"{type(array).__name__} is not an image: give a path, bytes, a file opened for bytes, "
            "a PIL image or a numpy array"
        )
    colours = len(shape) == 2 or (len(shape) == 3 and shape[2] in {3, 4})
    if kind != "uint8" or not colours or 0 in shape:
        raise BadInput(
            f"an array of {kind} and shape {tuple(shape)} is not an image: give uint8 of shape "
            "(height, width), (height, width, 3) or (height, width, 4)"
        )
    return array
