"""Bytes to pixels. The bytes are hostile; the parameters live in the manifest."""

from __future__ import annotations

import io
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from model_store.errors import ImageRejected, ImageTooLarge
from model_store.records.manifest import Preprocessing

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 40_000_000
ROWS_AT_ONCE = 64
INTERPOLATION = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}

Pixels = NDArray[np.uint8]

# Pillow warns of odd metadata that is not used here. Once for the process: filters that are set
# around each call are not safe where several threads decode.
warnings.filterwarnings("ignore", module=r"PIL\.")


def read_pixels(
    data: bytes, preprocessing: Preprocessing, *, max_pixels: int = MAX_PIXELS
) -> Pixels:
    """The image [S, S, 3] that the network sees: upright, RGB, the middle square."""
    size = preprocessing.image_size
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_pixels(image, max_pixels)
            if image.format == "JPEG":
                image.draft("RGB", (2 * size, 2 * size))  # decode no more than is needed
            square = _middle_square(_rgb(_upright(image)), preprocessing)
    except ImageRejected:
        raise
    except Image.DecompressionBombError as error:
        raise ImageTooLarge(f"an image with more than {max_pixels} pixels") from error
    except UnidentifiedImageError as error:
        raise ImageRejected(f"not an image in an accepted format ({', '.join(FORMATS)})") from error
    except MemoryError as error:
        raise ImageRejected("an image that takes too much memory to decode") from error
    # Pillow's decoders fail in many ways on damaged files, and which one says nothing to a user.
    except Exception as error:
        raise ImageRejected(f"a damaged image ({type(error).__name__}: {error})") from error
    return np.asarray(square)


def fit_pixels(pixels_HWC: Pixels, preprocessing: Preprocessing) -> Pixels:
    """The image [S, S, 3] that the network sees of RGB pixels of any size: the middle square."""
    size = preprocessing.image_size
    if pixels_HWC.shape[:2] == (size, size):
        return pixels_HWC
    image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
    return np.asarray(_middle_square(image, preprocessing))


def normalise(pixels_NHWC: Pixels, preprocessing: Preprocessing) -> NDArray[np.float32]:
    """What the network reads: [N, 3, S, S], contiguous."""
    mean = np.asarray(preprocessing.mean, dtype=np.float32)
    std = np.asarray(preprocessing.std, dtype=np.float32)
    scaled = (pixels_NHWC.astype(np.float32) / np.float32(255) - mean) / std
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def encode_png(pixels_HWC: Pixels) -> bytes:
    """Lossless: `read_pixels` gives the same pixels back."""
    buffer = io.BytesIO()
    Image.fromarray(pixels_HWC).save(buffer, format="PNG")
    return buffer.getvalue()


def _check_pixels(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise ImageTooLarge(f"an image of {width}×{height} has more than {max_pixels} pixels")
    if min(width, height) < 1:
        raise ImageRejected("an image without pixels")


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF says. `exif_transpose` would copy also what stands upright already."""
    turned = image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
    return ImageOps.exif_transpose(image) if turned else image


def _middle_square(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    size = preprocessing.image_size
    return ImageOps.fit(image, (size, size), method=INTERPOLATION[preprocessing.interpolation])


def _rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB: deep greyscale is scaled down, not clipped; transparency lies on white."""
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
    # 16-bit files come as I;16 or I; floats have no fixed range, so 0 to 1 is the convention.
    top = 65535.0 if image.mode != "F" else 255.0 if values.max() > 1 else 1.0
    scaled = np.empty(values.shape, dtype=np.uint8)
    for first in range(0, len(values), ROWS_AT_ONCE):  # all at once would be 32 bytes a pixel
        rows = slice(first, first + ROWS_AT_ONCE)
        scaled[rows] = np.clip(values[rows].astype(np.float64) * (255.0 / top), 0, 255).round()
    return Image.fromarray(scaled)
