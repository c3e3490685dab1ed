"""Pictures of the last answers are held for an hour, and no longer."""

from __future__ import annotations

from dne_serve.loop.collector import MAX_AGE_S, RecentCandidates
from dne_serve.loop.writer import GivenAnswer, KeepCandidate
from model_store.loop.inbox import MARKED

GIVEN = GivenAnswer(
    version=1, top=(("mug", 1.0),), margin=1.0, is_unknown=False, unknown_score=None
)


def test_a_picture_is_held_for_an_hour() -> None:
    now = 0.0
    recent = RecentCandidates(clock=lambda: now)
    recent.put(KeepCandidate(id="one", data=b"12", given=GIVEN))
    now = MAX_AGE_S - 1
    assert recent.get("one") is not None
    now = MAX_AGE_S + 1
    assert recent.get("one") is None
    assert len(recent) == 0


def test_a_deletion_is_marked_for_longer_than_a_picture_is_held() -> None:
    assert MARKED.total_seconds() > 2 * MAX_AGE_S


def test_the_bytes_of_those_that_went_are_free_again() -> None:
    recent = RecentCandidates(max_bytes=4)
    for name in ("one", "two", "two", "three"):
        recent.put(KeepCandidate(id=name, data=b"12", given=GIVEN))
    assert [recent.get(name) is not None for name in ("one", "two", "three")] == [
        False,
        True,
        True,
    ]
    recent.drop("two")
    recent.put(KeepCandidate(id="four", data=b"12", given=GIVEN))
    assert len(recent) == 2
