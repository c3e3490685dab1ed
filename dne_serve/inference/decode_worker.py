"""Decode images in a process of its own: read frames from stdin and write frames to stdout.

The process may be killed at any time, is limited in memory and processor time, and has none of the
server's secrets. `decode_process.py` starts it.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from dne_serve.inference.reencoding import reencode
from model_store.errors import ImageRejected, ImageTooLarge
from model_store.preprocess import read_pixels
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
