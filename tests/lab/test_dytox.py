"""DyTox computes its formulas, learns, goes on after an interruption, and shares DNE's base."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lab.method import Lesson
from lab.methods.dytox import Dytox, DytoxObjective, DytoxOptions
from lab.registry import read_choice
from lab.variants.alone import patches
from tests.lab.striped import state_of
from tests.lab.three_tasks import (
    PRESET,
    different,
    learnt,
    learnt_in_two_parts,
    run_of,
)
from trainer.learning.losses import LossWeights, binary


def grown(options: DytoxOptions | None = None) -> Dytox:
    torch.manual_seed(0)
    method = Dytox(PRESET, options or DytoxOptions())
    for task in ("ab", "cd", "ef"):
        method.expand(tuple(task))
    for part in method._later():
        torch.nn.init.normal_(part.token)
    return method


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", ["plain", "gated"])
def test_every_task_s_token_is_computed_as_if_it_were_alone(attention: str) -> None:
    method = grown(DytoxOptions(attention=attention))  # type: ignore[arg-type]
    expert = method.network.newest
    x_BPC = patches(expert, images())
    parts = method._later()
    tokens = [expert.token, *(part.token for part in parts)]
    norms = [expert.norm, *(part.norm for part in parts)]
    for token, norm, embedded in zip(tokens, norms, method.embeddings(images()), strict=True):
        sequence = torch.cat((token.expand(len(x_BPC), 1, -1), x_BPC), dim=1)
        block = expert.class_block
        alone = block.mix(block.attend(sequence, queries=1), []).out
        assert torch.allclose(norm(alone.squeeze(1)), embedded, atol=1e-5)


def test_the_first_task_alone_is_the_network_of_the_product() -> None:
    torch.manual_seed(0)
    method = Dytox(PRESET, DytoxOptions())
    method.expand(("a", "b"))
    assert torch.allclose(method.scores(images()), method.network(images()), atol=1e-5)


def test_a_classifier_reads_the_embedding_of_its_own_task_alone() -> None:
    method = grown()
    embedded = method.embeddings(images())
    before = method.classify(embedded)
    after = method.classify([embedded[0], embedded[1] + 1, embedded[2]])
    changed = (before != after).any(dim=0)
    assert changed.tolist() == [False, False, True, True, False, False]


def test_the_loss_is_what_plain_loops_compute() -> None:
    """4 images, 4 old and 2 new classes."""
    method, teacher = grown(), grown()
    del teacher.later[-1]
    torch.nn.init.normal_(teacher.network.newest.token)
    divergence = torch.nn.Linear(method.network.spec.token_width, 3)
    objective = DytoxObjective(
        classification=binary,
        weights=LossWeights(classification=0.3, distillation=0.7, expertise=0.1),
        teacher=teacher,
        divergence=divergence,
        old=4,
    )
    labels = [0, 4, 5, 3]
    with torch.no_grad():
        logits, taught = method.scores(images()), teacher.scores(images())
        diverging = divergence(method.embeddings(images())[-1])
        found = objective(method, images(), torch.tensor(labels))
    expected = 0.0
    for image, label in enumerate(labels):
        expected += 0.3 * _binary(logits[image].tolist(), label)
        expected += 0.7 * _divergence(taught[image].tolist(), logits[image, :4].tolist())
        expected += 0.1 * _binary(diverging[image].tolist(), max(0, label - 3))
    assert float(found.loss) == pytest.approx(expected / 4, rel=1e-4)
    assert int(found.right) == sum(
        int(row.argmax()) == label for row, label in zip(logits, labels, strict=True)
    )


def _binary(logits: list[float], label: int) -> float:
    chances = [1 / (1 + math.exp(-one)) for one in logits]
    return -sum(
        math.log(chance if place == label else 1 - chance) for place, chance in enumerate(chances)
    )


def _divergence(teacher: list[float], student: list[float]) -> float:
    def softmax(logits: list[float]) -> list[float]:
        return [math.exp(one) / sum(map(math.exp, logits)) for one in logits]

    pairs = zip(softmax(teacher), softmax(student), strict=True)
    return sum(p * math.log(p / q) for p, q in pairs)


@pytest.mark.parametrize(("weights", "expected"), [("authors", (1, 0.2)), ("sums", (4 / 6, 0.1))])
def test_weights_go_by_the_share_of_old_classes(
    weights: str, expected: tuple[float, float], tmp_path: Path
) -> None:
    run = run_of(f"dytox:weights={weights}", tmp_path)
    assert isinstance(run.method, Dytox)
    found = run.method._weights(run._lesson(2))
    assert found.classification == pytest.approx(2 / 6)
    assert (found.distillation, found.expertise) == pytest.approx(expected)


class Watched(Dytox):
    """Keep the tensors before the last lesson, and between its two phases."""

    before: dict[str, Tensor]
    between: dict[str, Tensor]

    def learn(self, lesson: Lesson) -> None:
        self.before = state_of(self)
        super().learn(lesson)

    def _tune(self, lesson: Lesson) -> None:
        self.between = state_of(self)
        super()._tune(lesson)


def test_three_tiny_tasks_are_learnt_and_only_the_parts_meant_to_learn_change(
    tmp_path: Path,
) -> None:
    run = run_of("dytox", tmp_path)
    run.method = method = Watched(PRESET, DytoxOptions())
    run.go()
    assert run.lines[-1].accuracy > 2 / 6
    learns = different(method.before, method.between)
    old = ("network.experts.0.token", "network.experts.0.norm", "network.heads", "later.0")
    assert not [name for name in learns if name.startswith(old)]
    assert {"network.experts.0.position", "later.1.token"} <= set(learns)
    tuned = different(method.between, state_of(method))
    encoder = tuple(f"network.experts.0.{one}" for one in ("patch_embed", "position", "blocks"))
    assert not [name for name in tuned if name.startswith(encoder)]
    assert {"network.experts.0.token", "later.0.token", "network.heads.0.weight"} <= set(tuned)


@pytest.mark.slow
def test_a_run_that_was_broken_off_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = state_of(learnt("dytox", tmp_path / "whole").method)
    for phase in ("learning", "balanced tuning"):
        parts = learnt_in_two_parts("dytox", tmp_path / phase, phase=phase, task=2)
        assert different(whole, state_of(parts.method)) == []


@pytest.mark.parametrize("options", ["loss=binary", "loss=binary,attention=gated"])
def test_the_first_task_is_the_one_of_dne(options: str) -> None:
    ours, theirs = (read_choice(f"{name}:{options}").build(PRESET) for name in ("dytox", "dne"))
    assert ours.base == theirs.base
    for one in (ours, theirs):
        torch.manual_seed(0)
        one.expand(("a", "b"))
    assert different(state_of(ours.base_module()), state_of(theirs.base_module())) == []
    assert state_of(ours).keys() == state_of(theirs).keys()
