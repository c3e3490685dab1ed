"""Write an audit line for every request to change something: who, when, from where, with what
result.

Lines are JSON. They go to the log, and to a file of their own if one is named. Refused requests
have lines too, up to a number each minute; the rest are counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from dne_serve.access.brake import Brake
from dne_serve.access.line_file import LineFile
from model_store.errors import WrongUsage
from model_store.records.sealing import timestamp

MAX_TEXT = 1000

log = logging.getLogger("dne_serve.audit")


class Audit:
    """Audit log of the server."""

    def __init__(self, path: Path | None, *, brake: Brake | None = None) -> None:
        """Raise WrongUsage for a file that cannot be written, before anything is served."""
        self._file = LineFile(path) if path is not None else None
        self._brake = brake or Brake()
        self._telling: asyncio.TimerHandle | None = None
        if self._file is not None:
            try:
                self._file.check()
            except OSError as error:
                raise WrongUsage(f"the audit log {path} cannot be written") from error

    def note(self, action: str, **facts: Any) -> None:
        """Write one line, as JSON: nothing that a client sends can look like a line of its own."""
        bounded = {name: _bounded(value) for name, value in facts.items()}
        line = json.dumps({"time": timestamp(), "action": _bounded(action), **bounded})
        log.info("%s", line)
        if self._file is not None:
            try:
                self._file.append(line.encode())
            except OSError as error:  # the line is in the log; the change has happened
                log.error("the audit log cannot be written: %s", error)

    def note_refused(self, action: str, *, status: int | None, **facts: Any) -> None:
        """Write a line for a request without a valid token. Anybody can send any number of them, so
        some have lines and the rest are counted. To be called on the event loop."""
        self._tell_left_out()
        if self._brake.admits(status or 0):
            self.note(action, status=status, **facts)
        elif self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_later(self._brake.window_s, self._tell_left_out)

    def close(self) -> None:
        """Write the counts of requests that have no line yet."""
        self._tell_left_out(also_now=True)

    def _tell_left_out(self, *, also_now: bool = False) -> None:
        left_out = self._brake.take_left_out(also_now=also_now)
        if left_out and self._telling is not None:
            self._telling.cancel()
            self._telling = None
        for status, count in left_out.items():
            self.note("refused requests that have no line of their own", status=status, count=count)


def _bounded(value: Any) -> Any:
    return f"{value[:MAX_TEXT]} …" if isinstance(value, str) and len(value) > MAX_TEXT else value
