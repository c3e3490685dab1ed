"""Decode images in a process of its own: read frames from stdin and write frames to stdout.

The process may be killed at any time, is limited in memory and processor time, and has none of the
server's secrets. `decode_process.py` starts it.

Pictures for the inbox are written anew: upright, at most 512 pixels long, without metadata. Nothing
of the uploaded file is passed on but its pixels: no EXIF, no comments, no bytes after the end.
"""

from __future__ import annotations

import io
import math
import os
import resource
import signal
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from model_store.errors import ImageRejected, ImageTooLarge
from model_store.preprocess import dhash, read_picture, read_pixels
from model_store.records.inbox import MAX_SIDE, MediaType
from model_store.records.manifest import Preprocessing

ASKED = struct.Struct(">II")
"""Lengths of the JSON and of the image. Both follow."""
ANSWERED = struct.Struct(">BI")
"""Kind and length of the payload, which follows."""
PIXELS, REJECTED, TOO_LARGE = range(3)
REENCODE = b"reencode"
"""Parameters of a request for a picture of the inbox instead of pixels of the network."""
READY = b"R"
"""Written once, so that the time to start is not taken from the first image."""
BASE_BYTES = 1 << 30
BYTES_A_PIXEL = 24


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


def main(arguments: list[str]) -> None:
    max_pixels, seconds, niceness = int(arguments[0]), float(arguments[1]), int(arguments[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends us by closing stdin
    _offer_to_the_oom_killer()
    _step_back(niceness)
    most = BASE_BYTES + BYTES_A_PIXEL * max_pixels
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    while frame := _read_frame(sys.stdin.buffer):
        _limit_cpu(seconds)
        kind, payload = _decode(*frame, max_pixels=max_pixels)
        sys.stdout.buffer.write(ANSWERED.pack(kind, len(payload)) + payload)
        sys.stdout.buffer.flush()


def _offer_to_the_oom_killer() -> None:
    """Be the first to go when memory is short: an image can be sent again, the server cannot."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may hide /proc, and images are decoded all the same
            Path("/proc/self/oom_score_adj").write_text("1000")


def _step_back(niceness: int) -> None:
    with suppress(OSError):  # a sandbox may forbid it, and images are decoded all the same
        os.nice(niceness)


def _limit_cpu(seconds: float) -> None:
    """End this process if nothing else does: the server that watches the clock may be gone."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = math.ceil(time.process_time() + seconds) + 1
    if hard == resource.RLIM_INFINITY or most <= hard:
        resource.setrlimit(resource.RLIMIT_CPU, (most, hard))


def _read_frame(stream: BinaryIO) -> tuple[bytes, bytes] | None:
    """Read the parameters and the image. None: the server has ended."""
    head = stream.read(ASKED.size)
    if len(head) < ASKED.size:
        return None
    parameters, image = ASKED.unpack(head)
    return stream.read(parameters), stream.read(image)


def _decode(parameters: bytes, image: bytes, *, max_pixels: int) -> tuple[int, bytes]:
    try:
        if parameters == REENCODE:
            return PIXELS, reencode(image, max_pixels=max_pixels).pack()
        preprocessing = Preprocessing.model_validate_json(parameters)
        return PIXELS, read_pixels(image, preprocessing, max_pixels=max_pixels).tobytes()
    except ImageTooLarge as error:
        return TOO_LARGE, str(error).encode(errors="replace")
    except ImageRejected as error:
        return REJECTED, str(error).encode(errors="replace")


if __name__ == "__main__":
    main(sys.argv[1:])
