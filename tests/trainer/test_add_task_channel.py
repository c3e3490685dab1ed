"""A version is promoted, or its channel stays, and the reason is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_store.errors import Interrupted, WrongUsage
from model_store.store.store import Store
from tests.trainer.folders import Listening, asked, learn, write_classes
from trainer.request import NetworkShape

LATER = NetworkShape()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "digits", ["0", "1", "2"])


def test_on_a_pinned_channel_a_version_is_published_and_not_promoted(
    store: Path, letters: Path, digits: Path, tmp_path: Path
) -> None:
    learn(asked(store, letters))
    learn(asked(store, digits, shape=LATER))
    opened = Store.open(str(store))
    opened.rollback(channel="production", to=1, actor="tests", reason="")
    outcome = learn(asked(store, write_classes(tmp_path / "signs", ["+"]), shape=LATER))
    assert (outcome.manifest.version, outcome.manifest.parent) == (3, 1)
    assert outcome.manifest.spec.classes == ("a", "b", "+")
    assert not outcome.promoted
    assert outcome.refused is not None
    assert "pinned to version 1" in outcome.refused
    assert "dne-store promote 3 --channel production" in outcome.refused
    head = opened.head("production")
    assert head is not None
    assert head.target == 1


class MovesTheChannel(Listening):
    """Someone else's version is promoted while this one is being learnt."""

    def __init__(self, store: Path) -> None:
        super().__init__()
        self._store = store

    def note(self, text: str) -> None:
        super().note(text)
        if text.startswith("learning "):
            Store.open(str(self._store)).promote(
                1, channel="production", actor="someone else", reason="meanwhile"
            )


def test_when_the_channel_has_moved_the_version_stays_a_branch(
    store: Path, letters: Path, digits: Path
) -> None:
    learn(asked(store, letters))
    outcome = learn(asked(store, digits, shape=LATER), progress=MovesTheChannel(store))
    assert Store.open(str(store)).versions() == [1, 2]
    assert not outcome.promoted
    assert outcome.refused is not None
    assert "version 2 is a branch" in outcome.refused
    assert "starts from the new head" in outcome.refused
    head = Store.open(str(store)).head("production")
    assert head is not None
    assert head.target == 1


def test_not_promoting_is_no_refusal_where_it_was_asked(store: Path, letters: Path) -> None:
    outcome = learn(asked(store, letters, promote=False))
    assert (outcome.promoted, outcome.refused) == (False, None)
    opened = Store.open(str(store))
    assert opened.versions() == [1]
    assert opened.head("production") is None


def test_a_channel_that_names_nothing_is_not_built_on(
    store: Path, letters: Path, digits: Path
) -> None:
    learn(asked(store, letters))
    with pytest.raises(WrongUsage, match=r"dne-store promote 1 --channel canary"):
        learn(asked(store, digits, shape=LATER, channel="canary"))


def test_a_run_announces_what_it_builds_on_until_it_ends(
    store: Path, letters: Path, digits: Path
) -> None:
    learn(asked(store, letters))
    opened = Store.open(str(store))
    seen: list[int] = []

    class Watching(Listening):
        def note(self, text: str) -> None:
            seen.append(len(opened.objects.list("runs")))

    learn(asked(store, digits, shape=LATER), progress=Watching())
    assert max(seen) == 1
    assert not opened.objects.list("runs")
    with pytest.raises(Interrupted):
        learn(
            asked(store, write_classes(store.parent / "more", ["x", "y"]), shape=LATER),
            progress=Listening(interrupt_in="learning"),
        )
    assert not opened.objects.list("runs")
