"""Read the programs of a guide: its fenced blocks of shell and Python, and the notes above them.

A note is a comment of HTML on the line above a block, which no reader of the page sees:

<!-- not executed: REASON -->   the block cannot run in a test
<!-- ends with 3 -->            its last command ends with this exit code
<!-- may end with 3 -->         its last command ends with 0 or with this exit code
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.packaging.project import ROOT
from tests.packaging.test_commands import simple_commands

GUIDES = {path.stem: path for path in sorted((ROOT / "docs/guides").glob("*.md"))}
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<language>sh|python)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
NOT_EXECUTED = "not executed: "
ENDING = re.compile(r"(may )?ends? with (\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    language: str
    text: str
    note: str

    @property
    def reason(self) -> str | None:
        """Say why the block is not executed; None if it is."""
        return self.note.removeprefix(NOT_EXECUTED) if self.note.startswith(NOT_EXECUTED) else None

    @property
    def endings(self) -> set[int]:
        """List the exit codes that the guide promises."""
        if found := ENDING.fullmatch(self.note):
            return {int(found[2])} | ({0} if found[1] else set())
        return {0}

    @property
    def is_server(self) -> bool:
        """Return whether the block goes on until it is stopped, in a second terminal."""
        words = [words for line in self.commands() for words in line]
        return len(words) == 1 and words[0][0] == "dne-serve" and "--new-token" not in words[0]

    def commands(self) -> Iterator[list[list[str]]]:
        """Part each line of shell into its simple commands."""
        for line in self.text.replace("\\\n", " ").replace("|\n", "| ").splitlines():
            if words := shlex.split(line, comments=True):
                yield simple_commands(words)


def blocks_of(text: str) -> list[Block]:
    return [
        Block(language=one["language"], text=one["text"], note=one["note"] or "")
        for one in BLOCK.finditer(text)
    ]


def guide(path: Path, *, port: int | None = None) -> list[Block]:
    """Read the blocks of a guide, for a server on another port."""
    text = path.read_text()
    return blocks_of(text.replace("127.0.0.1:8000", f"127.0.0.1:{port}") if port else text)
