"""Whatever the number of ranks, the same batches give the same version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import torch
from torch import Generator

from model_store.errors import DneError
from model_store.network.network import Network
from model_store.records.manifest import Preprocessing
from tests.model_store.networks import GEOMETRY, grown
from tests.trainer.folders import Listening, labelled
from tests.trainer.ranks.thread_ranks import together
from trainer.data.augment import Augmentation
from trainer.data.sampling import evened
from trainer.data.task_data import TaskData
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.fit import fit
from trainer.learning.losses import Objective, cross_entropy
from trainer.learning.plan import Plan
from trainer.learning.student import Student
from trainer.learning.token_reading import cache_of, read_tokens
from trainer.ranks.ranks import ALONE, BatchPart, Ranks, refuse_differences
from trainer.versions.finish import herded

PREPROCESSING = Preprocessing(image_size=8)


BUILDING = Lock()
WITHOUT_BIASES = replace(GEOMETRY, qkv_bias=False)
"""No answer depends on the biases of keys: their gradients are rounding, which AdamW enlarges."""


def fresh() -> Network:
    """Build the same network in every thread: the random start is drawn by all of torch."""
    with BUILDING:
        return grown([1], geometry=WITHOUT_BIASES)


def learn(
    ranks: Ranks,
    *,
    batch_size: int = 7,
    epochs: int = 2,
    kept: Path | None = None,
    progress: Listening | None = None,
    augment: str = "standard",
) -> dict[str, torch.Tensor]:
    """Learn from 33 images, which no number of ranks divides evenly. Return the weights."""
    network, images = fresh(), labelled([17, 16])
    progress, checkpoint = progress or Listening(), None
    if kept is not None:
        checkpoint = Checkpoint(kept, configuration={"seed": 0}, progress=progress, ranks=ranks)
    fit(
        network,
        images,
        parameters=network.learnable(),
        objective=Objective(classification=cross_entropy),
        plan=Plan(epochs=epochs, batch_size=batch_size, learning_rate=1e-3),
        augment=Augmentation.named(augment),
        preprocessing=PREPROCESSING,
        draw_epoch=evened(images, among=()),
        seed=0,
        name="learning",
        progress=progress,
        checkpoint=checkpoint,
        ranks=ranks,
    )
    return {name: value.clone() for name, value in network.state_dict().items()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "batch_size"), [(2, 7), (3, 2), (5, 33)])
def test_the_same_batches_give_the_same_weights_in_any_number_of_ranks(
    ranks: int, batch_size: int
) -> None:
    alone = learn(ALONE, batch_size=batch_size)
    shared = together(ranks, lambda one: learn(one, batch_size=batch_size))
    assert difference(alone, shared[0]) < 1e-4
    assert difference(alone, learn(ALONE, batch_size=batch_size, epochs=1)) > 1e-3  # it has learnt
    for other in shared[1:]:
        assert difference(shared[0], other) == 0


def test_loss_and_accuracy_are_those_of_the_whole_batch() -> None:
    alone, shared = Listening(), Listening()
    learn(ALONE, progress=alone)
    together(2, lambda one: learn(one, progress=shared if one.rank == 0 else None))
    assert shared.losses == pytest.approx(alone.losses, rel=1e-4)


def test_parts_of_a_batch_make_the_whole_and_none_is_left_without_work() -> None:
    for whole, ranks in ((10, 3), (4, 4), (2, 5), (64, 2)):
        parts = [BatchPart.of(whole, rank=rank, ranks=ranks) for rank in range(ranks)]
        held = [row for part in parts if part.images for row in range(whole)[part.rows]]
        assert held == list(range(whole))
        assert sum(part.weight for part in parts) == pytest.approx(ranks)
        assert all(len(range(whole)[part.rows]) >= 1 for part in parts)


def test_an_image_is_changed_alike_alone_and_in_a_part_of_its_batch() -> None:
    images = torch.rand(7, 3, 8, 8)
    augment = Augmentation.named("standard")
    whole = augment(images, Generator().manual_seed(3))
    for rank in range(2):
        part = BatchPart.of(7, rank=rank, ranks=2)
        generator = Generator().manual_seed(3)
        assert torch.equal(augment(images[part.rows], generator, part), whole[part.rows])


@pytest.mark.parametrize("goes_on", [1, 3])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, goes_on: int) -> None:
    whole = learn(ALONE, epochs=3)

    def begin(ranks: Ranks) -> None:
        progress = Listening(interrupt_in="learning", after=7)
        with pytest.raises(KeyboardInterrupt):
            learn(ranks, epochs=3, kept=tmp_path / "kept", progress=progress)

    together(2, begin)
    progress = Listening()

    def go_on(ranks: Ranks) -> dict[str, torch.Tensor]:
        said = progress if ranks.rank == 0 else None
        return learn(ranks, epochs=3, kept=tmp_path / "kept", progress=said)

    found = together(goes_on, go_on)
    assert progress.notes[0].startswith("going on after epoch 1 of learning")
    assert len(progress.losses) == 10  # of 15 steps
    assert difference(whole, found[-1]) < 1e-4


def student_of(network: Network) -> Student:
    return Student(
        network=network, aim="expert", preprocessing=PREPROCESSING, new_classes=("a", "b")
    )


def test_tokens_are_read_by_all_ranks_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.learning.token_reading.IMAGES_A_PART", 8)
    images, passed = labelled([17, 16]), [0, 0, 0]

    def read(ranks: Ranks) -> np.ndarray:
        student = student_of(fresh())
        tokens, cache = read_tokens(student, images, folder=None, progress=Listening(), ranks=ranks)
        known = cache.embeddings(images)  # no rank computes any of them again
        assert np.array_equal(known, tokens)
        passed[ranks.rank] = len(cache._known)
        return tokens

    alone = read(ALONE)
    for ranks in (2, 3):
        for tokens in together(ranks, read):
            assert np.array_equal(tokens, alone)
    assert passed == [33, 33, 33]


def test_the_memory_is_the_same_in_any_number_of_ranks() -> None:
    images = labelled([9, 8, 7])
    data = TaskData(
        for_training=images,
        new_images=24,
        new_held_out=images.take(np.arange(0)),
        judged_by=images.take(np.arange(0)),
        source="held-out",
    )

    def choose(ranks: Ranks) -> dict[str, list[int]]:
        student = student_of(fresh())
        cache = cache_of(student, student.lineage(), folder=None)
        return herded(images.classes, data=data, cache=cache, quota=4, ranks=ranks)

    alone = choose(ALONE)
    assert [len(rows) for rows in alone.values()] == [4, 4, 4]
    assert together(2, choose) == [alone, alone]
    assert list(together(2, choose)[1]) == ["a", "b", "c"]


def test_ranks_that_were_told_different_things_are_named() -> None:
    def tell(ranks: Ranks) -> None:
        images = "f" * 64 if ranks.rank == 1 else "0" * 64
        refuse_differences(ranks, {"images": images, "seed": 3}, what="data")

    sentence = "rank 1 has other data than rank 0: images ffffffff, not 00000000; nothing was"
    with pytest.raises(DneError, match=sentence):
        together(3, tell)
