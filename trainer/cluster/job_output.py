"""Divide the one stream of a job into progress and the answer behind the mark."""

from __future__ import annotations

from collections.abc import Iterator


class JobOutput:
    """Output of a job, as it comes. A stream that begins again is not shown twice."""

    def __init__(self, *, mark: str) -> None:
        self._mark = mark
        self._text = ""
        self._skip = 0
        self._shown = 0
        self._answer_at: int | None = None

    def begin_again(self) -> None:
        """Expect the stream from its beginning."""
        self._skip = len(self._text)

    def take(self, text: str) -> Iterator[str]:
        """Take the next piece, and yield the lines of progress that it completes."""
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        self._text += text[skipped:]
        while self._answer_at is None:
            end = self._text.find("\n", self._shown)
            if end < 0:
                return
            line = self._text[self._shown : end]
            self._shown = end + 1
            if line == self._mark:
                self._answer_at = self._shown
            else:
                yield line

    @property
    def answer(self) -> str:
        """The answer of the command, without the line break at its end."""
        return "" if self._answer_at is None else self._text[self._answer_at :].rstrip("\n")
