from __future__ import annotations

import math
import time

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from dne_serve.engines import scored
from dne_serve.engines.base import Floats
from dne_serve.engines.scored import Probabilities, softmax
from dne_serve.observe.answer_counts import MAX_LABELS, MAX_VERSIONS, AnswerCounts, AnswerFamilies
from model_store import __version__
from model_store.store.store import Store
from tests.dne_serve.observe.made_up import answered, failed, logits, resident
from tests.live_server import Live, png


def families_of(counts: AnswerCounts) -> AnswerFamilies:
    return AnswerFamilies(lambda: [("", counts)], by_model=False)


def registry_of(counts: AnswerCounts) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(families_of(counts))
    return registry


def test_answers_are_counted_by_version_and_best_class() -> None:
    counts = AnswerCounts()
    rows = (logits(0, 2, 1), logits(0, 3, 1), logits(5, 0, 0))
    counts.answered(answered(resident(4), *rows, unknown=1))
    ask = registry_of(counts).get_sample_value
    assert ask("dne_class_images_total", {"version": "4", "label": "class 1"}) == 2
    assert ask("dne_class_images_total", {"version": "4", "label": "class 0"}) == 1
    assert ask("dne_class_images_total", {"version": "4", "label": "class 2"}) == 0
    assert ask("dne_unknown_images_total", {"version": "4"}) == 1


def test_the_histogram_of_scores_holds_the_probability_that_clients_see() -> None:
    one = resident(temperature=2.0)
    values = logits(1.5, -0.5, 0.25)
    event = answered(one, values, logits(100, 0, 0))
    counts = AnswerCounts()
    counts.answered(event)
    ask = registry_of(counts).get_sample_value
    shown = sum(float(image.probabilities.max()) for image in event.scored)
    assert math.isclose(ask("dne_score_sum", {"version": "1"}) or 0, shown)
    assert math.isclose(shown, 1 + softmax(values, temperature=2.0).max(), rel_tol=1e-6)
    assert ask("dne_score_bucket", {"version": "1", "le": "0.5"}) == 0
    assert ask("dne_score_bucket", {"version": "1", "le": "0.6"}) == 1
    assert ask("dne_score_bucket", {"version": "1", "le": "+Inf"}) == 2
    assert ask("dne_score_count", {"version": "1"}) == 2


def test_logits_far_apart_at_a_low_temperature_are_scored() -> None:
    assert softmax(logits(1e30, -1e30, 0), temperature=1e-30).max() == 1.0


def test_the_probabilities_of_an_image_are_computed_once(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[float] = []

    def counted(row: Floats, *, temperature: float) -> Probabilities:
        computed.append(temperature)
        return softmax(row, temperature=temperature)

    monkeypatch.setattr(scored, "softmax", counted)
    assert live.predict(png(), png(1)).status_code == 200
    assert len(computed) == 2


def test_a_request_that_failed_or_is_not_traffic_has_no_answers_to_count() -> None:
    counts = AnswerCounts()
    counts.answered(failed(resident(), RuntimeError("no engine"), images=2))
    counts.answered(answered(resident(), logits(1, 0, 0), is_traffic=False))
    images, *_ = families_of(counts).collect()
    assert images.samples == []


def test_classes_beyond_the_first_hundred_share_a_series() -> None:
    counts = AnswerCounts()
    many = resident(classes=MAX_LABELS + 50)
    row = np.zeros(MAX_LABELS + 50, dtype=np.float32)
    for index in (0, MAX_LABELS, MAX_LABELS + 49):
        one = row.copy()
        one[index] = 9
        counts.answered(answered(many, one))
    images, *_ = families_of(counts).collect()
    assert len(images.samples) == MAX_LABELS + 1
    assert {one.labels["label"]: one.value for one in images.samples if one.value} == {
        "class 0": 1,
        "(other)": 2,
    }


def test_clients_that_ask_for_many_versions_add_no_more_series_than_eight_versions() -> None:
    counts = AnswerCounts()
    for version in range(1, 40):
        counts.answered(answered(resident(100), logits(1, 0, 0)))  # the served one
        counts.answered(answered(resident(version), logits(1, 0, 0)))
    images, unknown, *_ = families_of(counts).collect()
    assert len(unknown.samples) == MAX_VERSIONS
    assert len(images.samples) == MAX_VERSIONS * 3
    ask = registry_of(counts).get_sample_value
    assert ask("dne_class_images_total", {"version": "100", "label": "class 0"}) == 39


def test_a_large_request_has_scores_of_its_first_images_only() -> None:
    counts = AnswerCounts()
    wide = np.zeros(30_000, dtype=np.float32)
    counts.answered(answered(resident(classes=30_000), wide, wide, wide))
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
    live.serving.loaded._admit = _refuse
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
