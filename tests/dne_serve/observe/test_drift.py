"""Drift of the last answers against the held-out ones, compared with a plain computation."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dne_serve.observe import answer_counts
from dne_serve.observe.answer_counts import (
    FEWEST,
    SCORE_BINS,
    UNSCORED,
    WINDOW,
    Mix,
    RecentAnswers,
    Reference,
    grouped,
    stability_index,
)
from model_store.records.quality import SCORE_BOUNDS, Metrics
from model_store.store.store import Store
from tests.live_server import Live, live_server, png
from tests.trained_store import TrainedStore

CLASSES = ("cat", "dog", "owl")


def plain_index(expected: list[int], found: list[int]) -> float:
    """The textbook's sum, with half an image more in every bin."""
    total = 0.0
    for before, now in zip(expected, found, strict=True):
        p = (before + 0.5) / (sum(expected) + 0.5 * len(expected))
        q = (now + 0.5) / (sum(found) + 0.5 * len(found))
        total += (q - p) * math.log(q / p)
    return total


def held_out(*counts: int) -> Metrics:
    """Metrics of images of one class, taken for cats, dogs and owls."""
    taken_for = {name: count for name, count in zip(CLASSES, counts, strict=True) if count}
    return Metrics(confusion={"cat": taken_for}, images=sum(counts))


def test_the_index_is_that_of_the_textbook() -> None:
    chance = random.Random(0)
    for _ in range(50):
        counts = [[chance.randrange(500) for _ in range(6)] for _ in range(2)]
        assert stability_index(*counts) == pytest.approx(plain_index(*counts))
    assert stability_index([70, 30], [700, 300]) == pytest.approx(0, abs=1e-3)
    assert stability_index([100, 100], [900, 100]) > 0.25


def test_a_window_forgets_the_oldest_answers_and_counts_like_a_list() -> None:
    chance = random.Random(1)
    recent, answers = RecentAnswers(), []
    for _ in range(900):
        classes = [chance.randrange(3) for _ in range(chance.randrange(1, 6))]
        scored = chance.randrange(len(classes) + 1)
        bins = [chance.randrange(SCORE_BINS) for _ in range(scored)]
        unknown = chance.randrange(len(classes) + 1)
        recent.add(classes, bins=bins, unknown=unknown)
        padded = bins + [UNSCORED] * (len(classes) - scored)
        flags = [place < unknown for place in range(len(classes))]
        answers += list(zip(classes, padded, flags, strict=True))
    kept = answers[-WINDOW:]
    assert len(answers) > WINDOW == len(recent)
    by_class, by_bin = Counter(one for one, _, _ in kept), Counter(one for _, one, _ in kept)
    assert recent.by_class(3).tolist() == [by_class[index] for index in range(3)]
    assert recent.by_bin(SCORE_BINS).tolist() == [by_bin[index] for index in range(SCORE_BINS)]
    assert recent.unknown == sum(flag for _, _, flag in kept)


def test_drift_is_that_of_the_counts_in_the_window() -> None:
    recent = RecentAnswers()
    recent.add([0] * 300 + [1] * 200 + [2] * 100, bins=[11] * 400 + [3] * 200, unknown=0)
    scores = [0] * 9 + [40, 60, 300]
    metrics = held_out(100, 80, 60).model_copy(update={"scores": tuple(scores)})
    told = Reference.of(metrics, classes=CLASSES).drift(recent)
    assert told.classes == pytest.approx(plain_index([100, 80, 60], [300, 200, 100]))
    now = [0] * 12
    now[11], now[3] = 400, 200
    assert told.scores == pytest.approx(plain_index(scores, now))


def test_few_answers_and_few_held_out_images_give_no_index() -> None:
    recent = RecentAnswers()
    recent.add([0] * (FEWEST - 1), bins=[0] * (FEWEST - 1), unknown=0)
    reference = Reference.of(held_out(100, 80, 60), classes=CLASSES)
    assert reference.drift(recent).classes is None
    recent.add([0], bins=[0], unknown=0)
    assert reference.drift(recent).classes is not None
    assert reference.drift(recent).scores is None  # these metrics have no scores
    assert Reference.of(held_out(10, 5, 4), classes=CLASSES).drift(recent).classes is None
    assert Reference.of(Metrics(), classes=CLASSES).drift(recent).classes is None


def test_answers_of_a_class_that_was_retired_since_are_left_out() -> None:
    recent = RecentAnswers()
    recent.add([0] * 300 + [1] * 300, bins=[], unknown=0)
    left = Reference.of(held_out(100, 80, 60), classes=("cat", "owl"))
    assert left.drift(recent).classes == pytest.approx(plain_index([100, 60], [300, 300]))


def test_many_bins_are_put_together_and_a_heavy_one_stands_alone() -> None:
    even = np.full(1000, 5)
    groups = grouped(even, most=20)
    assert groups[0] == 0
    assert set(np.diff(groups)) <= {0, 1}
    assert 5 <= groups[-1] + 1 <= 20
    certain = np.array([0, 0, 1, 0, 0, 0, 0, 0, 0, 2, 3, 94])  # nearly all scores above 0.99
    mix = Mix.of(certain)
    assert mix is not None
    assert mix.counts.tolist() == [6, 94]
    doubtful = np.zeros(12, dtype=np.int64)
    doubtful[4] = 1000
    assert (mix.drift(doubtful) or 0) > 1


def test_chance_alone_stays_below_the_least_shift_that_counts() -> None:
    draws = np.random.default_rng(0)
    shares = draws.dirichlet(np.ones(40))
    found = []
    for _ in range(100):
        mix = Mix.of(draws.multinomial(200, shares))
        assert mix is not None
        found.append(mix.drift(draws.multinomial(FEWEST, shares)) or 0.0)
    assert np.quantile(found, 0.95) < 0.1


def test_a_trained_version_knows_the_scores_of_its_held_out_images(
    trained_store: TrainedStore,
) -> None:
    store = Store.open(str(trained_store.location))
    for number in (trained_store.third, trained_store.renaming):
        metrics = store.manifest(number).metrics
        assert metrics.scores is not None
        assert sum(metrics.scores) == metrics.images > 0
    assert store.manifest(trained_store.retirement).metrics.scores is None


def drift_of(live: Live) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(live.http.get("/metrics").text)
    [family] = [one for one in families if one.name == "dne_drift_psi"]
    return {(one.labels["version"], one.labels["of"]): one.value for one in family.samples}


@pytest.mark.long
def test_a_server_tells_the_drift_of_a_trained_version_once_it_has_answered_enough(
    trained_store: TrainedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only noise is sent, which no class looks like. The store was learnt from few images."""
    monkeypatch.setattr(answer_counts, "IMAGES_A_BIN", 2)
    version = trained_store.third
    with live_server(trained_store.location, max_queue=64) as live:
        live.wait_until_ready()
        predictions = []
        for seed in range(0, FEWEST + 12, 64):
            assert drift_of(live) == {}
            images = [png(seed + place) for place in range(64)]
            answer = live.predict(*images, query=f"?version={version}")
            predictions += answer.json()["predictions"]
        told = drift_of(live)
        metrics = live.serving.open_store().manifest(version).metrics
        classes = live.serving.open_store().manifest(version).classes
    answered = Counter(one["top"][0]["label"] for one in predictions)
    held = Counter[str]()
    for row in metrics.confusion.values():
        held.update(row)
    mix = Mix.of([held[name] for name in classes])
    bins = Counter(np.searchsorted(SCORE_BOUNDS, one["top"][0]["score"]) for one in predictions)
    scores = Mix.of(metrics.scores or ())
    expected = {
        "classes": mix and mix.drift(np.array([answered[name] for name in classes])),
        "scores": scores and scores.drift(np.array([bins[place] for place in range(SCORE_BINS)])),
    }
    known = {(str(version), name): value for name, value in expected.items() if value is not None}
    assert known
    assert told == pytest.approx(known, rel=1e-3)
