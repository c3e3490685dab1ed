"""A process that decodes images, one after the other, and nothing else.

It reads frames from stdin and writes frames to stdout until stdin ends. It may be killed at any
time, is limited in memory, and has none of the server's secrets. See `decoding.py`.
"""

from __future__ import annotations

import resource
import signal
import struct
import sys
from typing import BinaryIO

from model_store.errors import ImageRejected, ImageTooLarge
from model_store.manifest import Preprocessing
from model_store.preprocess import read_pixels

ASKED = struct.Struct(">II")
"""Bytes of the JSON, bytes of the image; then both."""
ANSWERED = struct.Struct(">BI")
"""What it is, and its bytes; then those."""
PIXELS, REJECTED, TOO_LARGE = range(3)
READY = b"R"
"""Written once, so that the time to start is not taken from the first image."""
BASE_BYTES = 1 << 30
BYTES_A_PIXEL = 24


def main(arguments: list[str]) -> None:
    max_pixels = int(arguments[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends us by closing stdin
    most = BASE_BYTES + BYTES_A_PIXEL * max_pixels
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    while frame := read_frame(sys.stdin.buffer):
        kind, payload = _decode(*frame, max_pixels=max_pixels)
        sys.stdout.buffer.write(ANSWERED.pack(kind, len(payload)) + payload)
        sys.stdout.buffer.flush()


def read_frame(stream: BinaryIO) -> tuple[bytes, bytes] | None:
    """The parameters and the image; None when the server has ended."""
    head = stream.read(ASKED.size)
    if len(head) < ASKED.size:
        return None
    parameters, image = ASKED.unpack(head)
    return stream.read(parameters), stream.read(image)


def _decode(parameters: bytes, image: bytes, *, max_pixels: int) -> tuple[int, bytes]:
    try:
        preprocessing = Preprocessing.model_validate_json(parameters)
        return PIXELS, read_pixels(image, preprocessing, max_pixels=max_pixels).tobytes()
    except ImageTooLarge as error:
        return TOO_LARGE, str(error).encode()
    except ImageRejected as error:
        return REJECTED, str(error).encode()


if __name__ == "__main__":
    main(sys.argv[1:])
