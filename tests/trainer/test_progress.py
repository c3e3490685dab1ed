from __future__ import annotations

import io

import pytest

from trainer.progress import Bars, Lines, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_progress_is_plain_lines() -> None:
    stream = io.StringIO()
    progress = show_progress(stream)
    assert isinstance(progress, Lines)
    progress.note("a note")
    with progress.phase("learning", total=10) as phase:
        phase.advance(10, loss=0.5, accuracy=0.75)
    note, line = stream.getvalue().splitlines()
    assert note == "a note"
    assert line.startswith("learning: 10/10, loss 0.500, accuracy 75.0 %, ")
    assert "images/s" in line
    assert "\x1b" not in stream.getvalue()


def test_a_long_phase_speaks_now_and_then_and_says_what_is_left() -> None:
    stream = io.StringIO()
    with Lines(stream, every_s=0.0).phase("learning", total=3) as phase:
        for _ in range(3):
            phase.advance(1)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert "s left" in lines[0]


def test_on_a_terminal_progress_is_bars_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    progress = show_progress(Terminal())
    assert isinstance(progress, Bars)
    progress.note("a [bold]note[/bold]")
    with progress.phase("learning", total=4) as phase:
        phase.advance(4, loss=0.5, accuracy=0.75)
    said = capsys.readouterr()
    assert said.out == ""
    assert "a [bold]note[/bold]" in said.err
    assert "learning" in said.err
