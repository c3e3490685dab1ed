"""Write down which functions of the three packages are called, in all threads, in their order."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

PACKAGES = ("dne_serve.", "trainer.", "model_store.")


class Places:
    """The places that were passed while `recording`, as `module.function` or `module.Class.method`.

    A coroutine counts again each time it is resumed.
    """

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.recording = True

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and self.recording:
            module = frame.f_globals.get("__name__", "")
            if module.startswith(PACKAGES):
                self.passed.append(f"{module}.{frame.f_code.co_qualname}")


@contextmanager
def followed(*, recording: bool = True) -> Iterator[Places]:
    """Follow this thread and the threads that start inside."""
    places = Places()
    places.recording = recording
    threading.setprofile(places)
    sys.setprofile(places)
    try:
        yield places
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        places.recording = False


def first_missed(walk: list[str], passed: list[str]) -> str | None:
    """Return the first place of a walk that was not passed after the places before it."""
    rest = iter(passed)
    return next((place for place in walk if place not in rest), None)
