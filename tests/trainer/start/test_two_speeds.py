"""A class in seconds, and an expert for it later, on a store that began with a pre-trained file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_store.errors import DataRejected, WrongUsage
from model_store.records.manifest import delta_of
from model_store.store.store import Store
from tests.trainer.command import Command
from tests.trainer.folders import Listening, asked, learn, write_classes
from tests.trainer.start.pretrained_start import EFFORT, later, network_of, run
from trainer.grow import deepen
from trainer.request import Deepen, GateLimits, NetworkShape
from trainer.versions.outcome import Outcome


def deepened(store: Path, **others: object) -> Outcome:
    request = {"store": str(store), "effort": EFFORT, "device": "cpu", "kind": "dense", **others}
    return deepen(Deepen(**request), progress=Listening())  # type: ignore[arg-type]


def head_of(store: Path) -> int:
    head = Store.open(str(store)).head("production")
    assert head is not None
    return head.target


@pytest.mark.long
def test_one_expert_is_learnt_for_all_tasks_since_the_last_one(
    begun: Path, digits: Path, tmp_path: Path
) -> None:
    run(later(begun, digits))
    parent = run(later(begun, write_classes(tmp_path / "signs", ["plus", "minus"]))).manifest
    outcome = deepened(begun)
    child = outcome.manifest
    assert child.deepened == ("digits", "signs")
    assert child.new_classes == ()
    assert [task.heads for task in child.tasks] == [2, 0, 1]
    assert [ref.kind for ref in delta_of(child, parent)] == ["expert", "classifier", "doubt"]
    assert child.tasks[:2] == parent.tasks[:2]
    assert child.tasks[2].training["images"] == parent.tasks[2].training["images"]
    assert (child.memory, child.held_out) == (parent.memory, parent.held_out)
    slices = network_of(begun, child).spec.token_width
    assert slices == network_of(begun, parent).spec.token_width + 32
    assert outcome.as_json()["deepened"] == ["digits", "signs"]


def test_an_expert_that_does_not_earn_its_cost_is_published_and_left(
    begun: Path, digits: Path
) -> None:
    run(later(begun, digits))
    outcome = deepened(begun)
    assert outcome.refused is not None
    assert "the expert does not earn its cost: accuracy went from 100.0 % to" in outcome.refused
    assert not outcome.promoted
    assert head_of(begun) == 2
    assert Store.open(str(begun)).versions() == [1, 2, 3]


@pytest.mark.long
def test_an_expert_that_earns_its_cost_is_promoted_and_the_next_task_reads_it(
    begun: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(later(begun, digits))
    monkeypatch.setattr("trainer.evaluation.gate.SIGNIFICANCE", 1.0)  # every gain is beyond chance
    outcome = deepened(begun, limits=GateLimits(min_gain=0, max_drop=1))
    assert outcome.promoted
    assert head_of(begun) == 3
    after = run(later(begun, write_classes(tmp_path / "signs", ["plus", "minus"]))).manifest
    assert [task.heads for task in after.tasks] == [2, 1, 0]
    assert len(after.experts) == 2
    deepened(begun, limits=GateLimits(min_gain=0, max_drop=1))
    with pytest.raises(WrongUsage, match="version 5 has no task without an expert"):
        deepened(begun)


def test_both_speeds_in_one_command(begun: Path, digits: Path) -> None:
    progress = Listening()
    outcome = run(later(begun, digits, quick=False), progress=progress)
    assert outcome.promoted
    assert outcome.deeper is not None
    assert outcome.deeper.manifest.deepened == ("digits",)
    assert outcome.deeper.manifest.parent == outcome.manifest.version
    assert outcome.any_refused == outcome.deeper.refused
    assert progress.phases.count("reading images") == 1


@pytest.mark.long
def test_a_run_that_ended_after_its_first_version_goes_on_with_the_expert(
    begun: Path, digits: Path
) -> None:
    run(later(begun, digits, quick=True))
    progress = Listening()
    outcome = run(later(begun, digits, quick=False), progress=progress)
    assert outcome.manifest.deepened == ("digits",)
    assert any("its expert is next" in note for note in progress.notes)


def test_other_images_of_known_classes_do_not_pass_for_the_same_run(
    begun: Path, digits: Path, tmp_path: Path
) -> None:
    run(later(begun, digits, quick=True))
    others = write_classes(tmp_path / "others", ["0", "1"], seed=5)
    for quick in (True, False):
        with pytest.raises((DataRejected, WrongUsage), match="'0'"):
            run(later(begun, others, quick=quick))
    assert Store.open(str(begun)).versions() == [1, 2]


def test_without_a_pre_trained_start_every_task_has_an_expert(
    store: Path, letters: Path, digits: Path
) -> None:
    with pytest.raises(WrongUsage, match="`quick=True` is for a model with a pre-trained start"):
        learn(asked(store, letters, quick=True, shape=NetworkShape(preset="tiny")))
    learn(asked(store, letters))
    with pytest.raises(WrongUsage, match="`quick=False` is for a model with a pre-trained start"):
        learn(asked(store, digits, quick=False, shape=NetworkShape()))
    with pytest.raises(WrongUsage, match="version 1 has no task without an expert"):
        deepened(store)


def test_options_that_do_not_fit_a_speed_are_refused(begun: Path, digits: Path) -> None:
    with pytest.raises(WrongUsage, match="`heads` does not fit"):
        later(begun, digits, quick=True, shape=NetworkShape(heads=1))
    with pytest.raises(WrongUsage, match="`extend` adds no task"):
        later(begun, digits, quick=True, extend=True)


def test_an_expert_cannot_be_learnt_for_classes_without_images(begun: Path, digits: Path) -> None:
    run(later(begun, digits, memory=0))
    with pytest.raises(DataRejected, match="the store keeps no images of '0', '1'"):
        deepened(begun)


@pytest.mark.long
def test_the_commands_say_what_happened(
    begun: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(begun, capsys)
    assert command("add-task", "--data", digits, "--no-quick", "--epochs", 1, "--json") == 3
    facts = json.loads(command.out)
    assert (facts["version"], facts["promoted"], facts["refused"]) == (2, True, None)
    assert facts["deeper"]["version"] == 3
    assert "does not earn its cost" in facts["deeper"]["refused"]
    assert command("deepen", "--kind", "dense", "--epochs", 1) == 3
    assert "not promoted: " in command.err
    assert "does not earn its cost" in command.err
    assert head_of(begun) == 2
    nowhere = Command(begun.parent / "nowhere", capsys)
    assert nowhere("deepen") == 2
    assert "there is no version" in nowhere.err


def test_a_command_by_the_clock_ends_well_if_there_is_nothing_to_learn(
    begun: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(begun, capsys)
    dense = ("deepen", "--kind", "dense")
    assert command(*dense) == 2
    assert command(*dense, "--if-needed", "--json") == 0
    facts = json.loads(command.out)
    assert (facts["version"], facts["deepened"]) == (None, [])
    assert "no task without an expert" in facts["nothing"]
    run(later(begun, digits))
    assert command(*dense, "--if-needed", "--epochs", 1) == 3  # there was something, and refused
    versions = Store.open(str(begun)).versions()
    assert command(*dense, "--if-needed") == 0
    assert f"version {versions[-1]} has an expert for these tasks" in command.out
    assert Store.open(str(begun)).versions() == versions  # not one more each night
    nowhere = Command(begun.parent / "nowhere", capsys)
    assert nowhere("deepen", "--if-needed") == 2
