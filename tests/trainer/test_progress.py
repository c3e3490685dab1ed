from __future__ import annotations

import io
import time

import pytest

from trainer.progress import Bars, ExpectedPhase, ProgressLines, clock, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_progress_is_plain_lines() -> None:
    stream = io.StringIO()
    progress = show_progress(stream)
    assert isinstance(progress, ProgressLines)
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
    with ProgressLines(stream, every_s=0.0).phase("learning", total=3) as phase:
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


EXPECTED = [
    ExpectedPhase(name="learning", images=4, gflop=1.0),
    ExpectedPhase(name="judging", images=4000, gflop=1.0),
]


def test_lines_of_a_run_tell_the_time_left_in_all() -> None:
    stream = io.StringIO()
    lines = ProgressLines(stream, every_s=0.0)
    with lines.whole(EXPECTED):
        with lines.phase("learning", total=4) as phase:
            time.sleep(0.01)
            phase.advance(2)
        with lines.phase("fitting the classifier", total=0):
            pass
    with lines.phase("learning", total=4) as phase:
        phase.advance(2)
    first, _, fitting, alone, _ = stream.getvalue().splitlines()
    assert first.endswith(" s left in all")
    assert fitting == "fitting the classifier: 0.0 s"
    assert "in all" not in alone


def test_one_bar_stands_for_the_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    bars = Bars()
    with bars.whole(EXPECTED):
        with bars.phase("learning", total=4) as phase:
            phase.advance(4, loss=0.5, accuracy=0.75)
        with bars.phase("judging", total=4000) as phase:
            phase.advance(4000)
    last = capsys.readouterr().err.splitlines()
    assert len(last) == 1
    assert "judging" in last[0]
    assert "100%" in last[0]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(4.6, "0:05"), (754.0, "12:34"), (3723.0, "1:02:03")]
)
def test_a_clock_shows_hours_only_where_there_are_some(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown
