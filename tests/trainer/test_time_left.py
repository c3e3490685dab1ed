from __future__ import annotations

import pytest

from trainer.progress import ExpectedPhase, TimeLeft


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


LEARNING = ExpectedPhase(name="learning", images=100, gflop=3.0)
BALANCING = ExpectedPhase(name="balancing", images=20, gflop=3.0)
JUDGING = ExpectedPhase(name="judging", images=40, gflop=1.0)


def begun(clock: Clock) -> TimeLeft:
    return TimeLeft([LEARNING, BALANCING, JUDGING], clock=clock)


def test_without_a_speed_there_is_no_time() -> None:
    left = begun(Clock())
    assert left.seconds() is None
    assert left.share == 0.0


def test_later_phases_are_judged_by_their_operations() -> None:
    clock = Clock()
    left = begun(clock)
    left.begin("learning", images=100)
    clock.now_s += 30.0
    left.advance(50)  # 150 of 400 GFLOP, 5 a second
    assert left.share == pytest.approx(150 / 400)
    assert left.seconds() == pytest.approx(30.0 + (60 + 40) / 5)


def test_a_phase_that_runs_is_judged_by_its_own_speed() -> None:
    clock = Clock()
    left = begun(clock)
    left.begin("learning", images=100)
    clock.now_s += 60.0
    left.advance(100)  # 5 GFLOP a second
    left.begin("balancing", images=20)
    clock.now_s += 30.0
    left.advance(10)  # one a second: 330 GFLOP in 90 s
    assert left.seconds() == pytest.approx(30.0 + 40 * 90 / 330)


def test_a_phase_that_a_checkpoint_has_behind_it_is_taken_out() -> None:
    clock = Clock()
    left = begun(clock)
    left.begin("balancing", images=10)  # half of it was done before, too
    clock.now_s += 10.0
    left.advance(10)
    assert left.share == pytest.approx(30 / 70)
    assert left.seconds() == pytest.approx(40 * 10 / 30)


def test_a_phase_that_was_not_expected_is_no_work() -> None:
    clock = Clock()
    left = begun(clock)
    left.begin("learning", images=100)
    clock.now_s += 60.0
    left.advance(100)
    before = left.seconds()
    left.begin("fitting the classifier", images=0)
    clock.now_s += 1000.0
    assert left.seconds() == before == pytest.approx(20.0)
    assert left.share == pytest.approx(300 / 400)


def test_the_end_leaves_nothing() -> None:
    clock = Clock()
    left = begun(clock)
    for phase in (LEARNING, BALANCING, JUDGING):
        left.begin(phase.name, images=phase.images)
        clock.now_s += 1.0
        left.advance(phase.images)
    assert left.share == 1.0
    assert left.seconds() == 0.0
