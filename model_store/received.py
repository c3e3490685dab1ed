"""Take bytes from strangers within limits: the pieces of an HTTP answer, and JSON.

Knows no HTTP library. Nothing here trusts a length or a type that a stranger names.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from typing import Any, NoReturn

_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_MAX_JSON_MEMORY = 1 << 28
"""Bytes of memory that the JSON of an answer may take when it is parsed."""
MAX_DEPTH = 100
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
LEADS_NOWHERE = "the answer is a redirect to something else than an HTTP address"
"""httpx reads the target of a redirect even if it is not followed, and fails on some of them."""
_NESTS = frozenset({list, dict})
_VALUE_BYTES = {b"[": 96, b"{": 160, b",": 72, b":": 160}
"""The most memory that Python takes for a list, an object, a value after a comma, and a key."""


class AnswerRefused(Exception):
    """An answer that is too long, too slow, or has an encoding that was not requested."""


class TooSlow(AnswerRefused):
    """An answer that is not complete at the deadline."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the answer was not complete after {seconds:g} s")


class ExchangeDeadline:
    """The whole seconds that are left. Reads as a number, each time anew.

    A timeout of a socket counts from the last byte on, so a server that sends one byte a second
    never meets it. As the timeout of every read and write of one exchange, a deadline ends the
    exchange. It raises TimeoutError once it has passed, as the socket would.
    """

    __slots__ = ("_ends", "_longest_s", "seconds")

    def __init__(self, seconds: float, *, longest_s: float = math.inf) -> None:
        """`longest_s` limits one read or write."""
        self.seconds = seconds
        self._longest_s = longest_s
        self._ends = time.monotonic() + seconds

    def __index__(self) -> int:
        self.check()
        return math.ceil(min(self._ends - time.monotonic(), self._longest_s)) or 1

    def check(self) -> None:
        """Raise TimeoutError if no time is left."""
        if time.monotonic() >= self._ends:
            raise TimeoutError

    def refuse(self, error: Exception) -> None:
        """Raise TooSlow for an error that the deadline caused, and not a shorter wait."""
        if time.monotonic() >= self._ends:
            raise TooSlow(self.seconds) from error


class Received:
    """The body of one answer, which is counted and unpacked while it arrives."""

    __slots__ = ("_inflater", "_most_bytes", "body")

    def __init__(self, encoding: str, *, most_bytes: int) -> None:
        """`encoding` is the answer's Content-Encoding. One layer of gzip is unpacked."""
        named = encoding.strip().lower()
        if named not in ("", "identity", "gzip"):
            raise AnswerRefused(f"the answer is encoded as {named[:40]!r}; gzip alone is accepted")
        self._inflater = zlib.decompressobj(_GZIP_WINDOW) if named == "gzip" else None
        self._most_bytes = most_bytes
        self.body = bytearray()

    def add(self, piece: bytes) -> None:
        """Keep the next piece, or raise AnswerRefused before the body has too many bytes."""
        left = self._most_bytes + 1 - len(self.body)
        if self._inflater is not None:
            try:
                piece = self._inflater.decompress(piece, left)
            except zlib.error as error:
                raise AnswerRefused("the answer is not the gzip that it says it is") from error
            if self._inflater.unused_data:
                raise AnswerRefused("the answer goes on after its gzip has ended")
        self.body += piece[:left]
        if len(self.body) > self._most_bytes:
            raise AnswerRefused(f"the answer has more than {self._most_bytes >> 20} MiB")

    def whole(self) -> bytes:
        """Return the body after its last piece."""
        if self._inflater is not None and not self._inflater.eof:
            raise AnswerRefused("the gzip of the answer ends too early")
        return bytes(self.body)


def parse_json(data: bytes, *, most_memory: int = _MAX_JSON_MEMORY) -> Any:
    """Parse JSON. Raise ValueError for JSON that takes too much memory or is nested too deeply, for
    NaN and Infinity, and for whole numbers of thousands of digits."""
    if memory_for_json(data) > most_memory:
        raise ValueError(f"it would take more than {most_memory >> 20} MiB of memory")
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    _refuse_depth(value)
    return value


def memory_for_json(data: bytes) -> int:
    """Estimate from above the bytes of memory that parsing takes: 3 bytes of JSON may take 80."""
    a_byte = 3 if data.isascii() and b"\\u" not in data else 8
    return a_byte * len(data) + sum(data.count(sign) * cost for sign, cost in _VALUE_BYTES.items())


def _refuse_depth(whole: Any) -> None:
    """Refuse nesting that can be read, and that is too deep to be compared or written later."""
    level = [whole]
    for _ in range(MAX_DEPTH):
        inner = (
            value.values() if type(value) is dict else value
            for value in level
            if type(value) in _NESTS
        )
        level = [value for values in inner for value in values if type(value) in _NESTS]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
