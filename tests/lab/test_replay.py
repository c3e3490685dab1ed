"""Test replay, and joint learning as the bound that it is held to."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.backbones import PlainNetwork, ResNet18
from lab.methods.joint import Joint, JointOptions
from lab.methods.replay import Replay, classify_frozen
from lab.results import read
from tests.lab.tiny import (
    TINY,
    Dying,
    Killed,
    assert_same_bits,
    run_cell,
    run_killed,
    tiny_run,
)

CHANCE = 1 / 6
BRIEF = replace(TINY, first_epochs=2, epochs=2, tuning_epochs=2)


@pytest.mark.parametrize("choice", ["replay", "replay:backbone=resnet"])
def test_replay_learns_three_tasks(choice: str, tmp_path: Path) -> None:
    _, lines = run_cell(choice, tmp_path)
    assert [line.classes for line in lines] == [2, 4, 6]
    assert lines[0].accuracy > 0.8
    assert lines[-1].accuracy > 2 * CHANCE


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "phases"), [("resnet", 1), ("resnet", 2), ("transformer", 4)])
def test_replay_goes_on_to_the_same_bits(backbone: str, phases: int, tmp_path: Path) -> None:
    choice = f"replay:backbone={backbone}"
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, _ = run_cell(choice, tmp_path / "whole", preset=BRIEF)
    killed = run_killed(choice, tmp_path / "killed", phases=phases, preset=BRIEF)
    assert_same_bits(killed.method, whole.method)


def test_balanced_tuning_changes_nothing_but_the_heads(tmp_path: Path) -> None:
    run, _ = run_cell("replay:backbone=resnet", tmp_path, preset=BRIEF)
    method = run.method
    assert isinstance(method, Replay)
    before = {name: one.clone() for name, one in method.state_dict().items()}
    method.network.heads.requires_grad_(True)
    method._tune(replace(run._lesson(2), checkpoint=None))
    changed = {name for name, one in method.state_dict().items() if not one.equal(before[name])}
    assert changed == {name for name in before if ".heads." in name}


def test_the_loss_of_tuning_is_the_cross_entropy_of_the_heads() -> None:
    torch.manual_seed(0)
    network = PlainNetwork(ResNet18(4)).eval()
    network.heads.grow(2)
    network.heads.grow(1)
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 2, 1, 1])
    logits = network(images)
    expected = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        expected += math.log(sum(math.exp(one) for one in row)) - row[label]
    step = classify_frozen(network, images, labels)
    assert step.loss.item() == pytest.approx(expected / 4, rel=1e-6)
    assert step.right.item() == (logits.argmax(dim=1) == labels).sum().item()
    step.loss.backward()
    assert all(one.grad is None for one in network.backbone.parameters())
    assert all(one.grad is not None for one in network.heads.parameters())


def test_replay_without_memory_is_plain_fine_tuning(tmp_path: Path) -> None:
    _, lines = run_cell("replay", tmp_path, preset=replace(BRIEF, memory=0))
    assert len(lines) == 3


def test_replay_takes_the_first_task_of_dne(tmp_path: Path) -> None:
    preset = replace(BRIEF, classes=2)
    _, (dne,) = run_cell("dne", tmp_path, preset=preset)
    _, (replay,) = run_cell("replay", tmp_path, preset=preset)
    assert not dne.shared_base
    assert replay.shared_base
    assert replay.accuracies == dne.accuracies


@pytest.mark.slow
def test_another_method_goes_on_with_a_killed_first_task(tmp_path: Path) -> None:
    preset = replace(BRIEF, classes=2)
    whole, killed = (tmp_path / name for name in ("whole", "killed"))
    whole.mkdir()
    killed.mkdir()
    dne, _ = run_cell("dne", whole, preset=preset)
    with pytest.raises(Killed):
        tiny_run("dne", killed, preset=preset, progress=Dying(0)).go()
    replay, (line,) = run_cell("replay", killed, preset=preset)
    assert line.resumed
    assert_same_bits(replay.method, dne.method)


def test_joint_learns_once_from_all_images(tmp_path: Path) -> None:
    run, (line,) = run_cell("joint", tmp_path)
    assert (line.task, line.classes, len(line.accuracies)) == (2, 6, 3)
    assert line.accuracy > 2 * CHANCE
    assert set(run._lesson(2).images.images_by_class.values()) == {24}


def test_joint_at_every_task_writes_each_line(tmp_path: Path) -> None:
    _, lines = run_cell("joint:at=every,backbone=resnet", tmp_path, preset=BRIEF)
    assert [line.classes for line in lines] == [2, 4, 6]


def test_joint_begins_anew_at_every_task() -> None:
    method = Joint(TINY, JointOptions())
    method.expand(("cat", "dog"))
    for one in method.parameters():
        one.data.fill_(7)
    method.expand(("cow",))
    assert not any((one == 7).any() for one in method.parameters())
    assert method.network.heads[0].weight.shape == (3, 32)
    assert len(method.network.heads) == 1


@pytest.mark.slow
def test_joint_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, _ = run_cell("joint", tmp_path / "whole", preset=BRIEF)
    killed = run_killed("joint", tmp_path / "killed", phases=0, preset=BRIEF)
    assert_same_bits(killed.method, whole.method)


def test_a_finished_joint_run_learns_nothing_more(tmp_path: Path) -> None:
    first, lines = run_cell("joint", tmp_path, preset=BRIEF)
    again, same = run_cell("joint", tmp_path, preset=BRIEF)
    assert same == lines == read([tmp_path / "out.jsonl"], note=print)
    assert_same_bits(first.method, again.method)
