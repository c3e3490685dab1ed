"""Test PODNet: its losses by hand, the parts that rest, and runs that are killed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.cell import DEVIATION, MEAN
from lab.method import Options
from lab.methods.podnet import (
    MARGIN,
    PodLoss,
    Podnet,
    flat_distance,
    pooled,
    stages_distance,
)
from lab.proxies import PROXIES, ProxyClassifier, kmeans, nca
from tests.lab.striped import (
    PRESET,
    School,
    assert_a_killed_run_goes_on,
    equal,
    run_of,
    some_images,
    state_of,
)

SCORES = [[2.0, -1.0, 0.5], [0.0, 3.0, -2.0], [1.0, 1.0, 1.0], [-0.5, 0.2, 0.1]]
LABELS = [2, 1, 0, 1]


def test_nca_leaves_the_own_class_out_of_the_soft_maximum() -> None:
    plain = 0.0
    for row, label in zip(SCORES, LABELS, strict=True):
        others = sum(math.exp(score) for place, score in enumerate(row) if place != label)
        plain += max(0.0, -math.log(math.exp(row[label] - 0.6) / others)) / 4
    found = nca(torch.tensor(SCORES), torch.tensor(LABELS), margin=0.6)
    assert found.item() == pytest.approx(plain)


def test_the_margin_counts_where_a_score_does_not_exceed_it() -> None:
    scores, labels = torch.tensor(SCORES[:1]), torch.tensor(LABELS[:1])
    with_margin, without = (nca(scores, labels, margin=one) for one in (0.6, 0.0))
    assert (with_margin - without).item() == pytest.approx(0.6)


def test_nca_is_zero_beyond_the_margin() -> None:
    assert nca(torch.tensor([[9.0, 1.0, 2.0]]), torch.tensor([0]), margin=0.6).item() == 0.0


def test_pooled_maps_are_sums_of_squares_over_width_and_over_height() -> None:
    maps = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    for image, found in zip(maps.tolist(), pooled(maps), strict=True):
        rows = [sum(one**2 for one in row) for channel in image for row in channel]
        turned = [list(column) for channel in image for column in zip(*channel, strict=True)]
        columns = [sum(one**2 for one in column) for column in turned]
        norm = math.sqrt(sum(one**2 for one in [*rows, *columns]))
        expected = sorted(one / norm for one in [*rows, *columns])
        assert sorted(found.tolist()) == pytest.approx(expected)


def test_distances_of_equal_maps_are_exactly_zero_and_so_is_their_gradient() -> None:
    maps = [torch.randn(4, 3, 4, 4, requires_grad=True)]
    features = torch.randn(4, 3, requires_grad=True)
    stages = stages_distance(maps, [maps[0].detach()])
    flat = flat_distance(features, features.detach())
    assert (stages.item(), flat.item()) == (0.0, 0.0)
    for gradient in torch.autograd.grad(stages + flat, [*maps, features]):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_the_distance_is_the_mean_over_images_and_stages() -> None:
    student = [torch.randn(4, 3, 2, 2), torch.randn(4, 2, 1, 1)]
    teacher = [torch.randn(4, 3, 2, 2), torch.randn(4, 2, 1, 1)]
    each = [
        math.dist(pooled(one[None])[0].tolist(), pooled(other[None])[0].tolist())
        for ours, theirs in zip(student, teacher, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]
    assert stages_distance(student, teacher).item() == pytest.approx(sum(each) / 8)


def test_the_flat_distance_is_one_minus_the_cosine() -> None:
    one, other = torch.randn(4, 3), torch.randn(4, 3)
    cosine = torch.cosine_similarity(one, other).mean().item()
    assert flat_distance(one, other).item() == pytest.approx(1 - cosine, abs=1e-6)


def test_a_class_is_scored_by_the_softmax_of_its_proxies() -> None:
    classifier = ProxyClassifier(3)
    classifier.expand(2)
    classifier.expand(1)
    torch.nn.init.constant_(classifier.scale, 1.7)
    features = torch.randn(4, 3)
    scores = classifier(features)
    proxies = torch.cat(list(classifier.proxies))
    assert scores.shape == (4, 3)
    for image in range(4):
        for place in range(3):
            cosines = [
                torch.cosine_similarity(features[image], proxies[place, one], dim=0).item()
                for one in range(PROXIES)
            ]
            total = sum(map(math.exp, cosines))
            plain = 1.7 * sum(math.exp(one) / total * one for one in cosines)
            assert scores[image, place].item() == pytest.approx(plain, abs=1e-5)


def test_kmeans_finds_groups() -> None:
    groups = torch.tensor([[0.0, 0.0], [0.0, 0.2], [5.0, 5.0], [5.0, 5.2], [5.0, 5.4]])
    torch.manual_seed(0)
    found = sorted(kmeans(groups, count=2).tolist())
    assert found == [pytest.approx([0.0, 0.1]), pytest.approx([5.0, 5.2])]


def test_kmeans_gives_as_many_centres_as_asked_of_fewer_points() -> None:
    centres = kmeans(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), count=5)
    assert centres.shape == (5, 2)
    assert {tuple(one) for one in centres.tolist()} == {(1.0, 0.0), (0.0, 1.0)}


def test_the_loss_is_nca_of_scaled_scores_and_the_weighted_distances() -> None:
    podnet, teacher = Podnet(PRESET, Options()).eval(), Podnet(PRESET, Options()).eval().backbone
    podnet.expand(("a", "b"))
    torch.nn.init.constant_(podnet.classifier.scale, 2.0)
    images, labels = some_images(), torch.tensor([0, 1, 1, 0])
    step = PodLoss(teacher=teacher, weight=1.5)(podnet, images, labels)
    nearness = nca(podnet.scores(images), labels, margin=MARGIN)
    stages = stages_distance(podnet.backbone.stages(images), teacher.stages(images))
    flat = flat_distance(podnet.features(images), teacher(images))
    plain = nearness + 1.5 * (3 * stages + flat)
    assert step.loss.item() == pytest.approx(plain.item(), rel=1e-5)


def test_new_proxies_begin_in_their_class_with_the_mean_norm_of_old_ones() -> None:
    podnet = Podnet(replace(PRESET, tuning_epochs=0), Options())
    School().teach(podnet, 0)
    School(preset=replace(PRESET, epochs=0)).teach(podnet, 1)
    old, new = podnet.classifier.proxies
    torch.testing.assert_close(new.norm(dim=-1), old.norm(dim=-1).mean().expand(new.shape[:2]))
    lesson = School().lesson(1)
    pixels = torch.from_numpy(lesson.images.pixels_NHWC).permute(0, 3, 1, 2).float()
    mean, deviation = (torch.tensor(one)[:, None, None] for one in (MEAN, DEVIATION))
    answers = podnet.scores((pixels / 255 - mean) / deviation).argmax(dim=1).numpy()
    asked = lesson.images.labels_N
    assert (answers[asked >= lesson.old] == asked[asked >= lesson.old]).mean() > 0.6


@pytest.mark.long
def test_older_proxies_rest_until_the_tuning_and_the_backbone_during_it() -> None:
    tuned = Podnet(PRESET, Options())
    untuned = Podnet(replace(PRESET, tuning_epochs=0), Options())
    untuned.load_state_dict(tuned.state_dict())
    for task in range(2):
        School().teach(tuned, task)
    School().teach(untuned, 0)
    before = untuned.classifier.proxies[0].clone()
    backbone = state_of(untuned.backbone)
    School().teach(untuned, 1)
    assert torch.equal(untuned.classifier.proxies[0], before)
    assert not equal(state_of(untuned.backbone), backbone)
    assert equal(state_of(tuned.backbone), state_of(untuned.backbone))
    assert not torch.equal(tuned.classifier.proxies[0], before)


def test_three_tasks_are_learnt(tmp_path: Path) -> None:
    whole = run_of("podnet", tmp_path / "whole")
    whole.go()
    assert whole.lines[-1].accuracy > 0.34


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    assert_a_killed_run_goes_on("podnet", tmp_path, phases=("learning", "balanced tuning"))
