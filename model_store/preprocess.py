"""Turn image bytes into pixels, and pixels into input of the network.

The bytes are hostile. The parameters are in the manifest.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, ExifTags, Image, ImageOps, UnidentifiedImageError

from model_store.errors import ImageRejected, ImageTooLarge
from model_store.records.inbox import MediaType
from model_store.records.manifest import Preprocessing

PNG_LEVEL = 2
"""A quarter of the time of the usual 6, for a sixth more bytes."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIC")
MAX_PIXELS = 51_000_000
"""Phones call 8192×6144 pixels 50 megapixels."""
_HEIC_BRANDS = frozenset(b"heic heix heim heis hevc hevx hevm hevs".split())
_BRANDS_END = 256
ROWS_AT_ONCE = 64
THUMBNAIL_SIDE = 96
_MAX_KEPT_PIXELS = 4096 * 4096
"""The largest image that a network takes; a store keeps images at the network's size."""
_LOSSLESS_SIDE = 64
"""The longest side of a thumbnail that is a PNG: JPEG would change it visibly and save nothing."""
QUALITY = 85
_INTERPOLATION = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}

if TYPE_CHECKING:  # workers that only decode must not load torch
    from torch import Tensor

Pixels = NDArray[np.uint8]
Numbers = TypeVar("Numbers", NDArray[np.float32], "Tensor")

# Pillow warns of odd metadata that is not used here. The filter is set once for the process,
# because setting it around each call is not safe in several threads.
warnings.filterwarnings("ignore", module=r"PIL\.")
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # each of several threads or processes decodes an image


def read_pixels(
    data: bytes, preprocessing: Preprocessing, *, max_pixels: int = MAX_PIXELS
) -> Pixels:
    """Decode an image to [S, S, 3]: upright, RGB, the middle square."""
    size = preprocessing.image_size
    with _opened(data, max_pixels=max_pixels, needed=size) as image:
        return np.asarray(_middle_square(_rgb(_upright(image)), preprocessing))


def read_picture(data: bytes, *, max_side: int, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode a whole image: upright, RGB, scaled down to at most `max_side` pixels a side."""
    with _opened(data, max_pixels=max_pixels, needed=max_side) as image:
        picture = _rgb(_upright(image))
        picture.thumbnail((max_side, max_side), Image.Resampling.BICUBIC, reducing_gap=2.0)
        picture.load()
        picture.info.clear()  # Pillow would write comments and profiles into the next file
        return picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumbnail:
    """A small picture with no byte of the file that it was made from."""

    data: bytes
    type: MediaType

    @classmethod
    def of(cls, image: bytes) -> Thumbnail:
        """Scale an image down. Raise ImageRejected where it cannot be decoded."""
        picture = read_picture(image, max_side=THUMBNAIL_SIDE, max_pixels=_MAX_KEPT_PIXELS)
        written = io.BytesIO()
        if max(picture.size) <= _LOSSLESS_SIDE:
            picture.save(written, format="PNG")
            return cls(data=written.getvalue(), type="image/png")
        picture.save(written, format="JPEG", quality=QUALITY)
        return cls(data=written.getvalue(), type="image/jpeg")


@contextmanager
def _opened(data: bytes, *, max_pixels: int, needed: int) -> Iterator[Image.Image]:
    """Open an image file; `needed` pixels a side are enough. Errors inside are those of a
    bad file."""
    try:
        with Image.open(io.BytesIO(data), formats=_pillow_formats(data)) as image:
            _check_pixels(image, max_pixels)
            if image.format == "JPEG":
                image.draft("RGB", (2 * needed, 2 * needed))  # decode no more than is needed
            yield image
    except ImageRejected:
        raise
    except Image.DecompressionBombError as error:
        raise ImageTooLarge(f"an image with more than {max_pixels} pixels") from error
    except UnidentifiedImageError as error:
        raise ImageRejected(f"not an image in an accepted format ({', '.join(FORMATS)})") from error
    except MemoryError as error:
        raise ImageRejected("an image that takes too much memory to decode") from error
    # Pillow's decoders raise many kinds of errors on damaged files, all with one meaning.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ImageRejected(f"a damaged image ({type(error).__name__}: {reason})") from error


def _pillow_formats(data: bytes) -> tuple[str, ...]:
    """List the formats that the bytes may have, by their names in Pillow."""
    if not _is_heic(data):
        return FORMATS[:-1]
    _register_heic()
    return ("HEIF",)


def _is_heic(data: bytes) -> bool:
    """Return whether the first box names a brand of HEIC. AVIF shares the other brands."""
    if data[4:8] != b"ftyp":
        return False
    brands = data[8 : min(int.from_bytes(data[:4]), _BRANDS_END)]
    return any(brands[at : at + 4] in _HEIC_BRANDS for at in range(0, len(brands), 4))


@cache
def _register_heic() -> None:
    """Teach Pillow to read HEIC. A library of its own decodes it, which few need."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError as error:
        raise ImageRejected(
            "a HEIC photo, which takes the extra `heic`: pip install 'dne-serve[heic]'"
        ) from error
    register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)


def fit_pixels(pixels_HWC: Pixels, preprocessing: Preprocessing) -> Pixels:
    """Cut and scale RGB pixels of any size to the middle square [S, S, 3]."""
    size = preprocessing.image_size
    if pixels_HWC.shape[:2] == (size, size):
        return pixels_HWC
    image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
    return np.asarray(_middle_square(image, preprocessing))


@dataclass(frozen=True, slots=True)
class Normalisation(Generic[Numbers]):
    """The arithmetic from pixels to input of the network, the same bits in numpy and torch.

    `white` is an array too: a division by a plain number may become a product with its inverse.
    """

    white: Numbers
    mean: Numbers
    std: Numbers

    @classmethod
    def of(
        cls, preprocessing: Preprocessing, array: Callable[[Sequence[float]], Numbers]
    ) -> Normalisation[Numbers]:
        """Build the constants by `array`, which chooses library, device and shape."""
        return cls(array((255.0,)), array(preprocessing.mean), array(preprocessing.std))

    def scale(self, pixels: Numbers) -> Numbers:
        """Scale pixels from 0…255 to 0…1."""
        return pixels / self.white

    def standardise(self, scaled: Numbers) -> Numbers:
        """Subtract the mean of each channel and divide by its standard deviation."""
        return (scaled - self.mean) / self.std

    def __call__(self, pixels: Numbers) -> Numbers:
        return self.standardise(self.scale(pixels))


def normalise(pixels_NHWC: Pixels, preprocessing: Preprocessing) -> NDArray[np.float32]:
    """Turn pixels into input of the network: [N, 3, S, S], contiguous."""
    normalisation = Normalisation.of(preprocessing, partial(np.asarray, dtype=np.float32))
    normed_NHWC = normalisation(pixels_NHWC.astype(np.float32))
    return np.ascontiguousarray(normed_NHWC.transpose(0, 3, 1, 2))


def encode_png(pixels_HWC: Pixels) -> bytes:
    """Encode pixels without loss: `read_pixels` gives the same pixels back."""
    buffer = io.BytesIO()
    Image.fromarray(pixels_HWC).save(buffer, format="PNG", compress_level=PNG_LEVEL)
    return buffer.getvalue()


def _check_pixels(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise ImageTooLarge(f"an image of {width}×{height} has more than {max_pixels} pixels")
    if min(width, height) < 1:
        raise ImageRejected("an image without pixels")


def _upright(image: Image.Image) -> Image.Image:
    """Turn an image as its EXIF says. `exif_transpose` would copy an upright image too."""
    turned = image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
    return ImageOps.exif_transpose(image) if turned else image


def _middle_square(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    size = preprocessing.image_size
    return ImageOps.fit(image, (size, size), method=_INTERPOLATION[preprocessing.interpolation])


def _rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB. Deep greyscale is scaled, not clipped. Transparent becomes white."""
    if image.mode.startswith("I") or image.mode == "F":
        return _from_deep(image).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        with_alpha = image.convert("RGBA")
        white = Image.new("RGBA", with_alpha.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, with_alpha).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_deep(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    if not np.isfinite(values).all():
        raise ImageRejected("an image with values that are not finite")
    # 16-bit files have the modes I;16 or I. Floats are taken to lie in 0…1, or in 0…255.
    top = 65535.0 if image.mode != "F" else 255.0 if values.max() > 1 else 1.0
    scaled = np.empty(values.shape, dtype=np.uint8)
    for first in range(0, len(values), ROWS_AT_ONCE):  # all at once would take 32 bytes a pixel
        rows = slice(first, first + ROWS_AT_ONCE)
        scaled[rows] = np.clip(values[rows].astype(np.float64) * (255.0 / top), 0, 255).round()
    return Image.fromarray(scaled)


def dhash(picture: Image.Image) -> int:
    """Compute the difference hash: 64 bits, each set where brightness rises to the right."""
    grey = picture.convert("L").resize((9, 8), Image.Resampling.BOX)
    rises = np.diff(np.asarray(grey, dtype=np.int16), axis=1) > 0
    return int.from_bytes(np.packbits(rises).tobytes())
