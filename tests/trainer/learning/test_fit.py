from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model_store.errors import DneError, WrongUsage
from model_store.network.network import Network
from model_store.preprocess import normalise
from model_store.records.manifest import Preprocessing
from tests.model_store.networks import grown
from tests.trainer.folders import Listening, labelled
from trainer.data.augment import Augmentation
from trainer.data.folders import LabelledImages
from trainer.data.sampling import balanced, can_be_balanced, evened
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.fit import MOST_HALVINGS, fit, normalisation_on, parameter_groups, rate_share
from trainer.learning.losses import Objective, Step, cross_entropy
from trainer.learning.plan import MAX_EPOCHS, MIN_EPOCHS, Plan, make_plan
from trainer.request import Effort

PREPROCESSING = Preprocessing(image_size=8)
PLAN = Plan(epochs=3, batch_size=4, learning_rate=1e-2)


def run_fit(
    network: Network,
    images: LabelledImages,
    *,
    progress: Listening,
    plan: Plan = PLAN,
    objective: Objective | None = None,
    most_loss: float | None = None,
    checkpoint: Checkpoint | None = None,
) -> None:
    fit(
        network,
        images,
        parameters=network.learnable(),
        objective=objective or Objective(classification=cross_entropy),
        plan=plan,
        augment=Augmentation.named("light"),
        preprocessing=PREPROCESSING,
        draw_epoch=evened(images, among=()),
        seed=0,
        name="learning",
        progress=progress,
        most_loss=most_loss,
        checkpoint=checkpoint,
    )


def test_fitting_lowers_the_loss() -> None:
    progress = Listening()
    plan = Plan(epochs=30, batch_size=8, learning_rate=1e-2)
    run_fit(grown([1], noise=0.0), labelled([16, 16]), progress=progress, plan=plan)
    assert np.mean(progress.losses[-8:]) < 0.5 * np.mean(progress.losses[:8])


def test_fitting_changes_the_newest_expert_and_the_heads_and_nothing_older() -> None:
    network = grown([1, 1])
    before = {name: value.clone() for name, value in network.state_dict().items()}
    run_fit(network, labelled([4, 4, 4, 4]), progress=Listening())
    changed = {
        name for name, value in network.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed
    assert not {name for name in changed if name.startswith("experts.0.")}
    assert {name.rsplit(".", 1)[0] for name in changed} >= {"heads.0", "heads.1"}


def test_a_loss_that_is_no_number_stops_the_run_and_says_where() -> None:
    plan = Plan(epochs=5, batch_size=4, learning_rate=1e30)
    with pytest.raises(DneError, match=r"the loss became nan in step \d+ of 20.* `learning_rate`"):
        run_fit(grown([1]), labelled([8, 8]), progress=Listening(), plan=plan)


TOO_FAST = Plan(epochs=12, batch_size=8, learning_rate=0.4)


def test_an_epoch_whose_loss_grew_is_learnt_again_at_half_the_rate() -> None:
    images, guess = labelled([16, 16]), math.log(2)
    left, mended = Listening(), Listening()
    run_fit(grown([1], noise=0.0), images, progress=left, plan=TOO_FAST)
    run_fit(grown([1], noise=0.0), images, progress=mended, plan=TOO_FAST, most_loss=guess)
    assert np.mean(left.losses[-8:]) > guess
    assert np.mean(mended.losses[-8:]) < 0.7 * guess
    rates = [float(note.rsplit(" ", 1)[1]) for note in mended.notes]
    assert rates == pytest.approx(
        [0.4 / 2**halvings for halvings in range(1, len(rates) + 1)], rel=0.1
    )
    assert "epoch 1 of 12" in mended.notes[0]


def test_a_run_that_begins_above_the_limit_keeps_its_rate() -> None:
    network, progress = grown([1], noise=0.0), Listening()
    with torch.no_grad():
        head = network.heads[0]
        assert isinstance(head, nn.Linear)
        head.bias.copy_(torch.tensor([0.0, 20.0]))
    plan = Plan(epochs=10, batch_size=8, learning_rate=3e-2)
    run_fit(network, labelled([16, 16]), progress=progress, plan=plan, most_loss=math.log(2))
    assert progress.losses[0] > 5
    assert not progress.notes
    assert np.mean(progress.losses[-4:]) < 0.5 * np.mean(progress.losses[:4])


def test_a_loss_that_is_lost_at_any_rate_stops_the_run() -> None:
    plan = Plan(epochs=5, batch_size=4, learning_rate=1e30)
    progress = Listening()
    with pytest.raises(DneError, match="the loss became nan"):
        run_fit(grown([1]), labelled([8, 8]), progress=progress, plan=plan, most_loss=0.7)
    assert len(progress.notes) == MOST_HALVINGS


def test_a_run_that_halved_its_rate_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    images = labelled([16, 16])

    def run(network: Network, progress: Listening, folder: str) -> None:
        checkpoint = Checkpoint(tmp_path / folder, configuration={}, progress=progress)
        run_fit(
            network,
            images,
            progress=progress,
            plan=TOO_FAST,
            most_loss=math.log(2),
            checkpoint=checkpoint,
        )

    whole, first, second = Listening(), Listening(interrupt_in="learning", after=40), Listening()
    networks = [grown([1], noise=0.0) for _ in range(3)]
    run(networks[0], whole, "whole")
    with pytest.raises(KeyboardInterrupt):
        run(networks[1], first, "stopped")
    run(networks[2], second, "stopped")
    assert first.notes
    assert len(second.losses) < len(whole.losses)
    for one, other in zip(networks[0].parameters(), networks[2].parameters(), strict=True):
        assert torch.equal(one, other)


class Cramped(Objective):
    """An objective for which there is room for four images at a time."""

    def __call__(self, network: Network, images_BCHW: Tensor, labels_B: Tensor) -> Step:
        if len(labels_B) > 4:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return Objective.__call__(self, network, images_BCHW, labels_B)


@pytest.mark.long
def test_exhausted_memory_says_which_batch_would_fit() -> None:
    network, images = grown([1]), labelled([16, 16])
    plan = Plan(epochs=1, batch_size=32, learning_rate=1e-2)
    cramped = Cramped(classification=cross_entropy)
    sentence = r"^memory ran out in batches of 32: nothing was published; `batch_size=4` fits$"
    with pytest.raises(DneError, match=sentence):
        run_fit(network, images, progress=Listening(), plan=plan, objective=cramped)


def test_other_faults_are_not_taken_for_exhausted_memory() -> None:
    class Broken(Objective):
        def __call__(self, network: Network, images_BCHW: Tensor, labels_B: Tensor) -> Step:
            raise RuntimeError("shapes do not fit")

    broken = Broken(classification=cross_entropy)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run_fit(grown([1]), labelled([8]), progress=Listening(), objective=broken)


def test_training_sees_pixels_as_the_server_does() -> None:
    pixels = labelled([3]).pixels_NHWC
    odd = Preprocessing(image_size=8, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    found = normalisation_on(torch.device("cpu"), odd)(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert np.array_equal(found, normalise(pixels, odd))


def test_an_epoch_of_no_new_class_is_every_image_once() -> None:
    draw = evened(labelled([5, 6]), among=())
    order = np.random.default_rng(0)
    first, second = draw(order), draw(order)
    assert sorted(first) == sorted(second) == list(range(11))
    assert first.tolist() != second.tolist()


def test_a_balanced_epoch_has_as_many_of_every_class_as_the_smallest_has() -> None:
    images = labelled([35, 22, 30])
    draw, order = balanced(images), np.random.default_rng(0)
    epochs = [draw(order) for _ in range(30)]
    for rows in epochs:
        assert np.bincount(images.labels_N[rows]).tolist() == [22, 22, 22]
        assert len(set(rows.tolist())) == 66
    assert set(np.concatenate(epochs).tolist()) == set(range(87))  # in time everything is used


def test_a_class_of_a_few_images_does_not_shorten_balanced_epochs_to_nothing() -> None:
    images = labelled([100, 2])
    rows = balanced(images)(np.random.default_rng(0))
    assert np.bincount(images.labels_N[rows]).tolist() == [20, 20]
    assert np.bincount(rows)[100:].tolist() == [10, 10]  # none comes again before the other


def test_uneven_new_classes_have_equal_shares_and_exemplars_come_once() -> None:
    images = labelled([4, 30, 10, 2])
    draw, order = evened(images, among=("b", "c", "d")), np.random.default_rng(0)
    first, second = draw(order), draw(order)
    for rows in (first, second):
        assert np.bincount(images.labels_N[rows]).tolist() == [4, 14, 14, 14]
        assert set(rows.tolist()) >= set(range(4))
    assert first.tolist() != second.tolist()
    even = labelled([3, 3])
    assert sorted(evened(even, among=("a", "b"))(order)) == list(range(6))


def test_without_images_of_a_class_there_is_no_balance() -> None:
    assert can_be_balanced(labelled([2, 1]))
    assert not can_be_balanced(labelled([2, 0]))


def test_only_matrices_decay() -> None:
    network = grown([2, 1])
    decaying, others = parameter_groups(network, network.learnable())
    kinds = {
        id(parameter): name.rsplit(".", 1)[1] for name, parameter in network.named_parameters()
    }
    assert {kinds[id(one)] for one in decaying["params"]} == {"weight", "query", "key", "value"}
    assert all(one.ndim >= 2 for one in decaying["params"])
    spared = {kinds[id(one)] for one in others["params"]}
    assert spared == {"bias", "weight", "position", "token", "scale", "value_bias"}
    assert (decaying["weight_decay"], others["weight_decay"]) == (pytest.approx(0.05), 0.0)


def test_the_rate_warms_up_and_falls_to_a_small_share() -> None:
    share = rate_share(100)
    shares = [share(step) for step in range(100)]
    assert shares[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[-1] < 0.02
    assert [rate_share(1)(0), rate_share(2)(1)] == [1.0, pytest.approx(1.0)]


def test_epochs_follow_from_the_number_of_images() -> None:
    def chosen(images: int) -> int:
        return make_plan(Effort(), images=images, width=128).epochs

    assert chosen(2) == MAX_EPOCHS
    assert chosen(10**6) == MIN_EPOCHS
    assert MAX_EPOCHS >= chosen(200) > chosen(1000) >= MIN_EPOCHS


def test_what_is_asked_is_what_is_planned() -> None:
    effort = Effort(epochs=3, batch_size=7, learning_rate=0.5)
    plan = make_plan(effort, images=1000, width=128)
    assert plan == Plan(epochs=3, batch_size=7, learning_rate=0.5)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_an_effort_that_makes_no_sense_is_wrong_usage(value: float) -> None:
    with pytest.raises(WrongUsage, match="`learning_rate` must be more than 0"):
        Effort(learning_rate=value)
