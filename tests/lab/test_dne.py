"""DNE and its options learn, go on after an interruption, and leave old experts as they are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from lab import saved
from lab.costs import count_flop
from lab.draws import constant, repeated
from lab.methods.dne import Dne, DneOptions
from lab.registry import read_choice
from lab.variants.drop_path import DropPath
from lab.variants.guide import TEMPERATURE, contrast, transfer
from tests.lab.striped import state_of
from tests.lab.three_tasks import PRESET, different, learnt, learnt_in_two_parts, run_of

OPTIONS = (
    "attention=plain",
    "drop_path=0.1,repeats=3",
    "guide=contrastive",
    "network=mhsa,attention=plain,k=2",
    "network=sta-both,attention=plain",
    "k=2,loss=binary,weights=authors,tuning=authors,decay=authors",
)

ALL = "dne:attention=plain,drop_path=0.1,repeats=3,guide=contrastive,head=statistics"


def slow(options: str) -> object:
    return pytest.param(options, marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [OPTIONS[0], *map(slow, OPTIONS[1:])])
def test_three_tiny_tasks_are_learnt_and_the_first_expert_keeps_its_bits(
    options: str, tmp_path: Path
) -> None:
    run = learnt(f"dne:{options}", tmp_path)
    assert run.lines[-1].accuracy > 2 / 6
    assert run.base_path is not None
    kept = saved.read(run.base_path, note=print)
    assert kept is not None
    after_one, _ = kept
    expert = {name: one for name, one in after_one.items() if "experts.0" in name}
    assert len(expert) > 10
    assert different(expert, state_of(run.method)) == []


def test_a_line_tells_what_was_learnt_alone_and_who_attends_to_whom(tmp_path: Path) -> None:
    quick = replace(PRESET, classes=4, first_epochs=1, epochs=1, tuning_epochs=0)
    run = run_of("dne:network=sta-spdh,attention=plain", tmp_path, preset=quick)
    run.go()
    first, second = run.lines
    assert first.new_alone == first.accuracy  # nothing is older
    assert second.new_alone is not None
    assert second.new_alone >= second.accuracies[-1]
    assert first.attention is None
    assert second.attention is not None
    assert list(second.attention) == ["SPSH", "DPSH", "SPDH", "DPDH"]
    assert sum(share for share, _ in second.attention.values()) == pytest.approx(1)
    assert second.attention["DPDH"] == (0, 0)


@pytest.mark.slow
def test_a_run_that_was_broken_off_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = state_of(learnt(ALL, tmp_path / "whole").method)
    for phase in ("learning", "balanced tuning"):
        parts = learnt_in_two_parts(ALL, tmp_path / phase, phase=phase, task=2)
        assert different(whole, state_of(parts.method)) == []


def test_options_that_change_the_first_task_have_a_base_of_their_own() -> None:
    names = ("", "attention=plain", "drop_path=0.1", "repeats=3", "loss=binary", "decay=authors")
    bases = {read_choice(f"dne:{one}").build(PRESET).base for one in names}
    assert len(bases) == len(names)
    assert (
        read_choice("dne:guide=contrastive,network=sta-ia,attention=plain,k=4").build(PRESET).base
        in bases
    )


def test_repeated_augmentation_visits_a_third_of_the_images_three_times() -> None:
    def draw(order: np.random.Generator) -> NDArray[np.int64]:
        return order.permutation(10)

    order = np.random.default_rng(0)
    first = order.permutation(10)[:4]
    rows = repeated(draw, 3)(np.random.default_rng(0))
    assert rows.tolist() == np.repeat(first, 3)[:10].tolist()
    assert (
        repeated(draw, 1)(np.random.default_rng(0)).tolist()
        == draw(np.random.default_rng(0)).tolist()
    )


def test_drop_path_drops_whole_images_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    layer, ones = DropPath(0.25), torch.ones(4000, 2, 3)
    dropped = layer(ones)
    kept = dropped[:, 0, 0] > 0
    assert torch.equal(dropped, kept[:, None, None] / 0.75 * ones)
    assert float(dropped.mean()) == pytest.approx(1, abs=0.05)
    assert not torch.equal(layer(ones), dropped)
    assert layer.eval()(ones) is ones


def test_contrast_is_what_plain_loops_compute() -> None:
    views = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    unit = [one / one.norm() for one in views]
    losses = []
    for view, partner in enumerate((2, 3, 0, 1)):
        powers = {
            other: math.exp(float(unit[view] @ unit[other]) / TEMPERATURE)
            for other in range(4)
            if other != view
        }
        losses.append(-math.log(powers[partner] / sum(powers.values())))
    assert float(contrast(views)) == pytest.approx(sum(losses) / 4, rel=1e-5)


def test_merged_features_teach_only_while_they_are_better() -> None:
    labels = torch.tensor([0, 1, 2, 0])
    good, bad = 5 * F.one_hot(labels, 3).float(), torch.zeros(4, 3)
    assert torch.equal(transfer(good, bad, labels), F.cross_entropy(bad, labels))
    taught = sum(
        float(p * (p.log() - q.log()))
        for row, other in zip(good.softmax(1), bad.softmax(1), strict=True)
        for p, q in zip(row, other, strict=True)
    )
    expected = float(F.cross_entropy(good, labels)) + taught / 4
    assert float(transfer(bad, good, labels)) == pytest.approx(expected, rel=1e-5)


def test_a_constant_rate_stays() -> None:
    assert {constant(10)(step) for step in range(10)} == {1.0}


def test_the_authors_weights_are_those_of_means_over_classes(tmp_path: Path) -> None:
    run = run_of("dne:weights=authors", tmp_path)
    assert isinstance(run.method, Dne)
    weights = run.method._weights(run._lesson(2))
    assert weights.classification == pytest.approx(2 / 6)
    assert weights.distillation == 1
    assert weights.expertise == pytest.approx(0.1 * 6 / 3)


@pytest.mark.parametrize("network", ["dne", "independent"])
def test_the_harness_counts_the_operations_that_a_hand_counts(network: str) -> None:
    method = Dne(PRESET, DneOptions(network=network))  # type: ignore[arg-type]
    method.expand(("a", "b"))
    method.expand(("c", "d", "e"))
    spec = method.network.spec
    patches, first, later, head = spec.patches, spec.width_of(0), spec.width_of(1), 32
    total = 0
    for width in (first, later):
        total += 2 * patches * (3 * spec.patch_size**2) * width  # patch embedding
        for queries, positions in ((patches, patches), (1, patches + 1)):
            total += 2 * positions * width * 3 * width  # queries, keys and values
            total += 2 * 2 * queries * positions * width  # scores, and mixing values
            total += 2 * queries * width * width  # output
        heads = width // head
        total += 2 * patches**2 * (3 * heads + width)  # scores by place, and mixing values
    for rows in (patches, 1):
        total += 2 * 2 * rows * first * 4 * first  # MLP of the first expert
        if network == "independent":
            total += 2 * 2 * rows * later * 4 * later
        else:
            sources = spec.source_heads(1)
            for reads, writes in ((head, 4 * head), (4 * head, head)):
                total += 2 * reads**3  # queries times keys
                total += 2 * rows * (reads**2 + sources * reads)  # scores
                total += 2 * rows * sources * reads * writes + 2 * rows * sources * writes
    total += 2 * (first + later) * 5  # both heads, each on the whole token
    assert count_flop(method, image_size=PRESET.image_size) == total
