"""Write a picture anew for the inbox: upright, at most 512 pixels long, without metadata.

Nothing of the uploaded file is passed on but its pixels: no EXIF, no comments, no bytes after the
end of the image.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass

from model_store.preprocess import dhash, read_picture
from model_store.records.inbox import MAX_SIDE, MediaType

_LOSSLESS_PIXELS = 128 * 128
"""A smaller picture is kept as PNG: JPEG would change it visibly and hardly make it smaller."""
QUALITY = 90
HEAD = struct.Struct(">HHQB")
"""Width, height, dHash and type; the file follows."""
TYPES: tuple[MediaType, ...] = ("image/jpeg", "image/png")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reencoded:
    """A picture as the inbox keeps it."""

    data: bytes
    type: MediaType
    width: int
    height: int
    dhash: int

    def pack(self) -> bytes:
        """Write it as one piece, to pass it between processes."""
        head = HEAD.pack(self.width, self.height, self.dhash, TYPES.index(self.type))
        return head + self.data

    @classmethod
    def unpack(cls, payload: bytes) -> Reencoded:
        width, height, dhash, kind = HEAD.unpack_from(payload)
        data = payload[HEAD.size :]
        return cls(data=data, type=TYPES[kind], width=width, height=height, dhash=dhash)


def reencode(data: bytes, *, max_pixels: int) -> Reencoded:
    """Decode an image file and encode its pixels. Raise ImageRejected for a bad file."""
    picture = read_picture(data, max_side=MAX_SIDE, max_pixels=max_pixels)
    lossless = picture.width * picture.height <= _LOSSLESS_PIXELS
    written = io.BytesIO()
    if lossless:
        picture.save(written, format="PNG", compress_level=6)
    else:
        picture.save(written, format="JPEG", quality=QUALITY)
    return Reencoded(
        data=written.getvalue(),
        type="image/png" if lossless else "image/jpeg",
        width=picture.width,
        height=picture.height,
        dhash=dhash(picture),
    )
