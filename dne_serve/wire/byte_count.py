"""Count the bytes of a request that are not its body.

The parser hands on nothing of a header line or a trailer that has not ended, and nothing at all of
a chunk's size and extensions. Only the bytes that were given to it can be counted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Count of one request at a time. `limit` holds for its headers and trailers; the sizes and
    extensions of chunks may take as many bytes as the body besides."""

    limit: int
    _body: int = 0
    _other: int = 0
    _without_body: int = 0
    """Bytes in a row of which none was of the body: an extension or a trailer of any length."""
    _body_here: int = 0
    _is_shared: bool = False

    def begin_request(self, *, is_shared: bool) -> None:
        """Begin to count a request. A piece that also ends an earlier request (`is_shared`) does
        not count: the parser does not tell which part of it belongs to this one."""
        self._body = self._other = self._without_body = self._body_here = 0
        self._is_shared = is_shared

    def add_body(self, count: int) -> None:
        self._body += count
        self._body_here += count

    def add_piece(self, count: int) -> None:
        """Count a piece after it was parsed, so that `add_body` has been told of its body."""
        other = 0 if self._is_shared else count - self._body_here
        self._other += other
        self._without_body = 0 if self._body_here else self._without_body + other
        self._body_here, self._is_shared = 0, False

    @property
    def is_over(self) -> bool:
        return self._other > self.limit + self._body or self._without_body > self.limit
