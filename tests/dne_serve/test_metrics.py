from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from dne_serve.engines.base import Resident
from dne_serve.inference.answers import probabilities_of
from dne_serve.rollout.answer_counts import MAX_LABELS, MAX_VERSIONS, AnswerCounts, best_score
from model_store import __version__
from model_store.records.quality import Metrics
from model_store.store.store import Store
from tests.live_server import Live, png


def resident(version: int = 1, *, classes: int = 3, temperature: float = 1.0) -> Resident:
    """A version as far as the counts look at it."""
    calibration = SimpleNamespace(temperature=temperature)
    labels = tuple(f"class {index}" for index in range(classes))
    manifest = SimpleNamespace(calibration=calibration, metrics=Metrics())
    fake = SimpleNamespace(version=version, labels=labels, manifest=manifest)
    return cast(Resident, fake)


def logits(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


def registry_of(counts: AnswerCounts) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(counts)
    return registry


def test_answers_are_counted_by_version_and_best_class() -> None:
    counts = AnswerCounts()
    counts.count(resident(4), logits=[logits(0, 2, 1), logits(0, 3, 1), logits(5, 0, 0)], unknown=1)
    ask = registry_of(counts).get_sample_value
    assert ask("dne_class_images_total", {"version": "4", "label": "class 1"}) == 2
    assert ask("dne_class_images_total", {"version": "4", "label": "class 0"}) == 1
    assert ask("dne_class_images_total", {"version": "4", "label": "class 2"}) == 0
    assert ask("dne_unknown_images_total", {"version": "4"}) == 1


def test_the_histogram_of_scores_holds_the_probability_that_clients_see() -> None:
    one = resident(temperature=2.0)
    values = logits(1.5, -0.5, 0.25)
    assert math.isclose(
        best_score(values, resident=one), probabilities_of(one, values).max(), rel_tol=1e-6
    )
    counts = AnswerCounts()
    counts.count(one, logits=[values, logits(100, 0, 0)], unknown=0)
    ask = registry_of(counts).get_sample_value
    assert ask("dne_score_bucket", {"version": "1", "le": "0.5"}) == 0
    assert ask("dne_score_bucket", {"version": "1", "le": "0.6"}) == 1
    assert ask("dne_score_bucket", {"version": "1", "le": "+Inf"}) == 2
    assert ask("dne_score_count", {"version": "1"}) == 2


def test_logits_far_apart_at_a_low_temperature_are_scored() -> None:
    one = resident(temperature=1e-30)
    assert best_score(logits(1e30, -1e30, 0), resident=one) == 1.0


def test_classes_beyond_the_first_hundred_share_a_series() -> None:
    counts = AnswerCounts()
    many = resident(classes=MAX_LABELS + 50)
    row = np.zeros(MAX_LABELS + 50, dtype=np.float32)
    for index in (0, MAX_LABELS, MAX_LABELS + 49):
        one = row.copy()
        one[index] = 9
        counts.count(many, logits=[one], unknown=0)
    images, *_ = counts.collect()
    assert len(images.samples) == MAX_LABELS + 1
    assert {one.labels["label"]: one.value for one in images.samples if one.value} == {
        "class 0": 1,
        "(other)": 2,
    }


def test_clients_that_ask_for_many_versions_add_no_more_series_than_eight_versions() -> None:
    counts = AnswerCounts()
    for version in range(1, 40):
        counts.count(resident(100), logits=[logits(1, 0, 0)], unknown=0)  # the served one
        counts.count(resident(version), logits=[logits(1, 0, 0)], unknown=0)
    images, unknown, *_ = counts.collect()
    assert len(unknown.samples) == MAX_VERSIONS
    assert len(images.samples) == MAX_VERSIONS * 3
    ask = registry_of(counts).get_sample_value
    assert ask("dne_class_images_total", {"version": "100", "label": "class 0"}) == 39


def test_a_large_request_has_scores_of_its_first_images_only() -> None:
    counts = AnswerCounts()
    wide = np.zeros(30_000, dtype=np.float32)
    counts.count(resident(classes=30_000), logits=[wide] * 3, unknown=0)
    ask = registry_of(counts).get_sample_value
    assert ask("dne_score_count", {"version": "1"}) == 1
    assert ask("dne_class_images_total", {"version": "1", "label": "class 0"}) == 3


def test_a_server_counts_classes_scores_and_the_parts_of_a_request(live: Live) -> None:
    answer = live.predict(png(), png()).json()
    label, version = answer["predictions"][0]["label"], answer["version"]
    found = f'dne_class_images_total{{label="{label}",version="{version}"}}'
    assert live.metric(found) == 2
    assert live.metric(f'dne_score_count{{version="{version}"}}') == 2
    unknown = sum(one["unknown"] for one in answer["predictions"])
    assert live.metric(f'dne_unknown_images_total{{version="{version}"}}') == unknown
    assert live.metric("dne_decode_seconds_count") == 1
    assert live.metric("dne_wait_seconds_count") == 2
    assert 1 <= live.metric("dne_compute_seconds_count") <= 2
    assert live.metric("dne_queue_limit_images") == live.serving.settings.max_queue


def test_metrics_tell_what_runs_and_what_the_process_takes(live: Live) -> None:
    text = live.http.get("/metrics").text
    families = {one.name: one for one in text_string_to_metric_families(text)}
    (build,) = families["dne_build_info"].samples
    assert (build.value, build.labels["version"]) == (1, __version__)
    assert {"python", "backend", "device"} <= build.labels.keys()
    for name in ("process_resident_memory_bytes", "process_cpu_seconds", "process_open_fds"):
        assert families[name].samples[0].value > 0


def test_metrics_tell_how_long_the_head_has_not_been_served(live: Live, store: Store) -> None:
    until = time.monotonic() + 10
    while not live.metric("dne_followed_timestamp_seconds") and time.monotonic() < until:
        time.sleep(0.02)
    assert time.time() - live.metric("dne_followed_timestamp_seconds") < 5
    assert time.time() - live.metric("dne_swap_timestamp_seconds") < 60
    assert live.metric("dne_channel_version") == live.metric("dne_served_version") == 2
    live.admin("/rollback", to=1)
    assert live.metric("dne_channel_version") == live.metric("dne_served_version") == 1


def test_a_head_that_cannot_be_loaded_is_named_and_the_time_stands_still(
    live: Live, store: Store
) -> None:
    live.serving.residents._admit = _refuse
    store.rollback(channel="production", to=1, actor="tests", reason="")
    until = time.monotonic() + 10
    while live.metric("dne_following") and time.monotonic() < until:
        time.sleep(0.02)
    assert (live.metric("dne_channel_version"), live.metric("dne_served_version")) == (1, 2)
    before = live.metric("dne_followed_timestamp_seconds")
    time.sleep(0.3)
    assert live.metric("dne_followed_timestamp_seconds") == before


def _refuse(manifest: object) -> None:
    raise MemoryError("no room")
