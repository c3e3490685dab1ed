"""Heed a request to end, even where its exception was lost."""

from __future__ import annotations

from types import FrameType


class Interrupts:
    """Requests to end this process.

    Python drops an exception that is raised while it destroys an object. So a request is kept, and
    heeded at the next exchange with other ranks.
    """

    def __init__(self) -> None:
        self._asked = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal as Ctrl-C is handled."""
        self._asked = True
        raise KeyboardInterrupt

    def heed(self) -> None:
        """Raise KeyboardInterrupt if there was a request."""
        if self._asked:
            raise KeyboardInterrupt
