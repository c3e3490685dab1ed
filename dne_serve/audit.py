"""Who asked to change something, when, from where, and what came of it: one JSON line each.

Lines go to the log, and to a file of their own where one is named. Refused attempts are in it too.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.types import Message, Scope, Send

from dne_serve.auth import TOKEN
from dne_serve.problems import answer_to
from model_store.errors import WrongUsage
from model_store.record import timestamp

FACTS = "dne.audit"
"""Where a request keeps what its route knows of the change: `to`, `reason`, `record`."""

log = logging.getLogger("dne_serve.audit")


class Audit:
    def __init__(self, path: Path | None) -> None:
        """WrongUsage for a file that cannot be written, before anything is served."""
        self._path = path
        if path is not None:
            try:
                self._append(b"")
            except OSError as error:
                raise WrongUsage(f"the audit log {path} cannot be written") from error

    def note(self, action: str, **facts: Any) -> None:
        """JSON, so that nothing a client sends can look like a line of its own."""
        line = json.dumps({"time": timestamp(), "action": action, **facts})
        log.info("%s", line)
        if self._path is not None:
            try:
                self._append(f"{line}\n".encode())
            except OSError as error:  # the line is in the log; the change has happened
                log.error("the audit log cannot be written: %s", error)

    def _append(self, data: bytes) -> None:
        """Opened anew each time, so that the file may be rotated away."""
        if self._path is None:
            return
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, data)  # a line at once: other writers cannot come in between
        finally:
            os.close(handle)


@asynccontextmanager
async def audited(scope: Scope, send: Send) -> AsyncIterator[Send]:
    """Inside, answers go through what is yielded; at the end the request is in the audit log."""
    status: int | None = None

    async def watched(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    facts: dict[str, Any] = scope.setdefault(FACTS, {})
    try:
        yield watched
    except Exception as error:
        status = status or answer_to(error).status
        raise
    finally:
        token = scope.get(TOKEN)
        scope["app"].state.serving.audit.note(
            f"{scope['method']} {scope['path']}",
            who=token.name if token else None,
            address=scope["client"][0] if scope.get("client") else None,
            status=status,
            **facts,
        )
