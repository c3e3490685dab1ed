"""Threads are chosen by timing steps, once in a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model_store.records.manifest import Preprocessing
from model_store.tables import counted
from tests.model_store.networks import grown
from tests.trainer.folders import Listening, labelled
from trainer.data.augment import Augmentation
from trainer.data.sampling import evened
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.fit import ChooseThreads, fit
from trainer.learning.losses import Objective, cross_entropy
from trainer.learning.plan import Plan
from trainer.ranks.threads import FEWEST_IMAGES, choose_threads


def step_of(seconds: dict[int, float]) -> Callable[[], None]:
    """A step that takes so long with so many threads."""
    return lambda: time.sleep(seconds[torch.get_num_threads()])


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({4: 0.02, 2: 0.02, 1: 0.002}, 1),
        ({4: 0.02, 2: 0.002, 1: 0.02}, 2),
        ({4: 0.002, 2: 0.01, 1: 0.02}, 4),
        ({4: 0.02, 2: 0.019, 1: 0.019}, 4),
    ],
)
def test_fewer_threads_are_taken_only_if_they_are_clearly_faster(
    seconds: dict[int, float], chosen: int
) -> None:
    torch.set_num_threads(4)
    notes: list[str] = []
    choose_threads(FEWEST_IMAGES, step_of(seconds), note=notes.append)
    assert torch.get_num_threads() == chosen
    assert [f"learning with {counted(chosen, 'thread')}:" in note for note in notes] == [True] * (
        chosen != 4
    )


def test_a_short_run_is_not_timed() -> None:
    torch.set_num_threads(2)
    choose_threads(FEWEST_IMAGES - 1, pytest.fail, note=pytest.fail)
    assert torch.get_num_threads() == 2


def learn(choose: ChooseThreads | None) -> list[float]:
    network, images, progress = grown([1]), labelled([9, 8]), Listening()
    fit(
        network,
        images,
        parameters=network.learnable(),
        objective=Objective(classification=cross_entropy),
        plan=Plan(epochs=2, batch_size=4, learning_rate=1e-2),
        augment=Augmentation.named("standard"),
        preprocessing=Preprocessing(image_size=8),
        draw_epoch=evened(images, among=()),
        seed=0,
        name="learning",
        progress=progress,
        choose_threads=choose,
    )
    return progress.losses


def test_steps_that_are_timed_change_nothing() -> None:
    timed: list[int] = []

    def choose(images: int, attempt: Callable[[], None]) -> None:
        timed.append(images)
        attempt()
        attempt()

    assert learn(choose) == learn(None)
    assert timed == [34]


class Nothing:
    """A state without tensors."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def load(self, tensors: object) -> None:
        pass


def test_a_run_goes_on_with_the_threads_that_it_began_with(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    begun = Checkpoint(tmp_path, configuration={}, progress=Listening())
    begun.save("learning", 1, Nothing(), last=False)
    torch.set_num_threads(3)
    Checkpoint(tmp_path, configuration={}, progress=Listening()).take_threads()
    assert torch.get_num_threads() == 2
