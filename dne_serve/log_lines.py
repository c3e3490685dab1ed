r"""Write each log record on one line.

A line break inside a record, also between the lines of a traceback, is written as `\n`. So nothing
that a client sends can look like a record of its own, and `sed 's/\\n/\n/g'` shows a traceback as
usual. `--log-level info,json` writes each record as a JSON object instead, for collectors of logs.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

FACTS = "facts"
"""Attribute of a log record: a mapping that becomes fields of a JSON line."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Control characters, line and paragraph separators, marks that turn the direction of text around,
# and halves of characters, which cannot be written at all.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

log = logging.getLogger("dne_serve")


def on_one_line(text: str) -> str:
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class OneLine(logging.Formatter):
    """Formatter that escapes line breaks and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return on_one_line(super().format(record))


class JsonLine(logging.Formatter):
    """Formatter that writes a record as a JSON object. A record's `facts` are fields of it."""

    def format(self, record: logging.LogRecord) -> str:
        made = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": made.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FACTS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


FORMATTERS: dict[str, Callable[[], logging.Formatter]] = {
    "text": lambda: OneLine(FORMAT),
    "json": JsonLine,
}


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler whose own faults take one line too."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Report a lost record on one line; the base class would take many."""
        said = on_one_line(f"a record of {record.name} was lost: {sys.exc_info()[1]!r}")
        with suppress(OSError, ValueError):  # nobody is left to tell
            sys.stderr.write(f"{said}\n")


def set_up_log(setting: str) -> None:
    """Set up the log as the setting says: a level, and a form after a comma."""
    level, _, form = setting.partition(",")
    root = logging.getLogger()
    if not root.handlers:  # else the calling program has set up the log
        handler = StderrHandler(sys.stderr)
        handler.setFormatter(FORMATTERS[form or "text"]())
        root.addHandler(handler)
        _log_uncaught()
    root.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # clients' faults: we answer 400


def _log_uncaught() -> None:
    """Log warnings and errors that end a thread, which Python would print past the log."""
    logging.captureWarnings(True)

    def on_thread(ended: threading.ExceptHookArgs) -> None:
        name = ended.thread.name if ended.thread else "unknown"
        log.error("the thread %s has ended", name, exc_info=ended.exc_value)

    def on_unraisable(raised: sys.UnraisableHookArgs) -> None:
        log.error("%s in %r", raised.err_msg or "ignored", raised.object, exc_info=raised.exc_value)

    threading.excepthook = on_thread
    sys.unraisablehook = on_unraisable
