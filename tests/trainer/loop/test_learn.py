"""`dne-train add-task --from-inbox`, on labels that people have given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from model_store.errors import ChannelMoved, DataRejected, Interrupted, NothingToLearn
from model_store.loop.inbox import Judgement
from model_store.loop.items import open_index
from model_store.loop.waiting import FEWEST_OF_NEW, WaitingLabels, find_waiting
from model_store.maintenance.edit_classes import Care, rename_class, retire_class
from model_store.store.store import Store
from tests.trainer.command import Command
from tests.trainer.folders import SHAPE, Listening, asked, write_classes
from tests.trainer.loop.labelled import inbox_of, label_pictures
from trainer.add_task import add_task
from trainer.data.checks import MIN_IMAGES_PER_CLASS
from trainer.loop.learn import FromInbox, learn_from_inbox
from trainer.request import Effort, GateLimits, NetworkShape


def care(store: Path) -> Care:
    return Care(store=Store.open(str(store)), channel="production", actor="tests")


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One task, letters a and b. To be copied."""
    folder = tmp_path_factory.mktemp("learnt")
    data = write_classes(folder / "letters", ["a", "b"])
    add_task(asked(folder / "models", data, shape=SHAPE), progress=Listening())
    return folder / "models"


@pytest.fixture
def store(learnt: Path, tmp_path: Path) -> Path:
    shutil.copytree(learnt, tmp_path / "models")
    return tmp_path / "models"


def learn(store: Path, *, progress: Listening | None = None, **more: object) -> FromInbox:
    request = asked(store, Path("/inbox"), **{"shape": NetworkShape(), **more})
    return learn_from_inbox(request, progress=progress or Listening())


def waiting(store: Path) -> WaitingLabels:
    opened = Store.open(str(store))
    head = opened.head("production")
    assert head is not None
    return find_waiting(opened, open_index(inbox_of(store)), head=opened.resolve(head))


def counts(store: Path) -> dict[str, int]:
    found = waiting(store)
    return {name: len(some) for name, some in {**found.known, **found.new}.items()}


def test_the_command_extends_known_classes_and_then_learns_new_ones(
    dne_train: Command, letters: Path
) -> None:
    dne_train.add(letters)
    ids = label_pictures(dne_train.store, {"zebra": 12, "a": 12})
    assert dne_train("add-task", "--from-inbox", "--epochs", 1, "--json") == 0
    facts = json.loads(dne_train.out)
    assert (facts["version"], facts["parent"], facts["new_classes"]) == (3, 2, ["zebra"])
    assert (facts["before"]["version"], facts["before"]["extended"]) == (2, ["a"])
    used = inbox_of(dne_train.store).used()
    assert {version: len(record.items) for version, record in used.items()} == {2: 12, 3: 12}
    assert {item for record in used.values() for item in record.items} == set(ids)
    assert dne_train("add-task", "--from-inbox") == 2
    assert "no label waits" in dne_train.err
    assert "/label" in dne_train.err


def test_data_and_the_inbox_exclude_each_other(dne_train: Command, letters: Path) -> None:
    assert dne_train("add-task", "--from-inbox", "--data", letters) == 2
    assert "either --data DATA or --from-inbox" in dne_train.err
    assert dne_train("add-task") == 2


@pytest.mark.parametrize("option", ["--extend", "--val-data=x", "--hierarchy=folders"])
def test_options_of_a_folder_do_not_fit_the_inbox(dne_train: Command, option: str) -> None:
    assert dne_train("add-task", "--from-inbox", option) == 2
    assert "--from-inbox" in dne_train.err


@pytest.mark.long
def test_labels_of_a_refused_version_wait_again(store: Path) -> None:
    label_pictures(store, {"zebra": 60, "horse": 60}, looks_like="anything")
    outcome = learn(store, limits=GateLimits(min_new=1.0))
    assert outcome.any_refused
    assert counts(store) == {"horse": 60, "zebra": 60}
    assert len(inbox_of(store).used()) == 1


def test_labels_of_a_version_that_was_rolled_back_wait_again(store: Path) -> None:
    label_pictures(store, {"zebra": 12})
    learn(store)
    assert counts(store) == {}
    Store.open(str(store)).rollback(channel="production", to=1, actor="tests", reason="")
    assert counts(store) == {"zebra": 12}


def test_a_label_that_was_changed_waits_again(store: Path) -> None:
    first, *_ = label_pictures(store, {"zebra": 12})
    learn(store)
    inbox_of(store).judge(first, Judgement.of_class("a"), actor="tests")
    assert counts(store) == {"a": 1}


def test_a_single_image_of_a_new_class_waits_and_stops_nobody(store: Path) -> None:
    label_pictures(store, {"zebra": 1, "horse": 4})
    progress = Listening()
    outcome = learn(store, progress=progress)
    assert outcome.last.manifest.new_classes == ("horse",)
    assert outcome.left == {"zebra": "a new class needs at least 2 images, and this one has 1"}
    assert any("left in the inbox: 'zebra'" in note for note in progress.notes)
    with pytest.raises(NothingToLearn, match="'zebra': a new class needs at least 2 images"):
        learn(store)
    assert FEWEST_OF_NEW == MIN_IMAGES_PER_CLASS


def test_images_of_a_retired_class_are_left_with_the_way_out(store: Path) -> None:
    retire_class("b", care=care(store))
    label_pictures(store, {"b": 12})
    with pytest.raises(NothingToLearn, match="rename-class"):
        learn(store)


def test_a_label_from_before_a_renaming_means_the_renamed_class(store: Path) -> None:
    label_pictures(store, {"b": 2})
    rename_class("b", "bee", care=care(store))
    assert {name: len(some) for name, some in waiting(store).known.items()} == {"bee": 2}
    label_pictures(store, {"b": 3}, seed=8)
    assert {name: len(some) for name, some in waiting(store).new.items()} == {"b": 3}


def test_a_name_that_differs_in_case_only_is_noted(store: Path) -> None:
    label_pictures(store, {"A": 4})
    progress = Listening()
    assert learn(store, progress=progress).last.manifest.new_classes == ("A",)
    assert any("differ in case" in note for note in progress.notes)


def test_an_item_that_is_deleted_meanwhile_is_left_out(store: Path) -> None:
    gone, *_ = label_pictures(store, {"zebra": 5})

    class Deleting(Listening):
        def note(self, text: str) -> None:
            super().note(text)
            if text.startswith("from the inbox"):
                inbox_of(store).delete(gone)

    progress = Deleting()
    learn(store, progress=progress)
    assert any(note.startswith("1 picture left out") for note in progress.notes)
    (used,) = inbox_of(store).used().values()
    assert len(used.items) == 4
    assert gone not in used.items


def test_names_that_no_folder_may_have_are_learnt(store: Path) -> None:
    label_pictures(store, {".hidden": 3, "é" * 150: 3, "<b>": 3})
    assert set(learn(store).last.manifest.new_classes) == {".hidden", "é" * 150, "<b>"}


def test_an_extension_by_known_images_does_not_stop_the_task(store: Path) -> None:
    label_pictures(store, {"a": 12, "zebra": 4}, seed=0)  # the images that the task has learnt
    progress = Listening()
    outcome = learn(store, progress=progress)
    assert [one.manifest.version for one in outcome.outcomes] == [2]
    assert any(note.startswith("no extension") for note in progress.notes)
    with pytest.raises(DataRejected, match="given all of these"):
        learn(store)


def test_an_interrupted_run_goes_on_where_it_was(store: Path, tmp_path: Path) -> None:
    label_pictures(store, {"zebra": 12})
    options = {"checkpoint": tmp_path / "checkpoint", "effort": Effort(epochs=3)}
    with pytest.raises(Interrupted, match="goes on after epoch"):
        learn(store, progress=Listening(interrupt_in="learning", after=3), **options)
    progress = Listening()
    learn(store, progress=progress, **options)
    assert any(note.startswith("going on after") for note in progress.notes)


def test_a_second_run_with_the_same_labels_is_not_promoted(store: Path) -> None:
    """Another run ends between this one's look at the inbox and its look at the channel."""
    label_pictures(store, {"a": 12})

    class Overtaken(Listening):
        def note(self, text: str) -> None:
            if text.startswith("from the inbox"):
                learn(store)

    with pytest.raises((ChannelMoved, DataRejected)):
        learn(store, progress=Overtaken())
    head = Store.open(str(store)).head("production")
    assert head is not None
    assert head.target == 2
