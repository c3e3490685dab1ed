from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_store.inference.forward import Lineage
from model_store.network.network import Network
from model_store.records.manifest import total_bytes
from model_store.spec import NetworkSpec
from tests.model_store.networks import grown
from tests.trainer.folders import Listening, asked, write_classes
from trainer.add_task import add_task
from trainer.evaluation.forecast import Before, Forecast, forecast
from trainer.request import NetworkShape


def test_the_forecast_is_what_is_then_published(tmp_path: Path) -> None:
    store = tmp_path / "models"
    for name, shape in (("letters", None), ("signs", NetworkShape())):
        data = write_classes(tmp_path / name, [f"{name} 1", f"{name} 2"])
        progress = Listening()
        others = {"shape": shape} if shape else {}
        outcome = add_task(asked(store, data, **others), progress=progress)
        told = outcome.forecast
        assert told is not None
        assert told.version.bytes == total_bytes(outcome.manifest.model_shards)
        assert told.delta_bytes == outcome.as_json()["delta_bytes"]
        assert str(told) in progress.notes
        assert (told.parent is None) == (outcome.parent is None)
    notes = [one.split(" ")[0] for one in progress.notes]
    assert notes.index("the") < notes.index("learning")  # told before, not after


def told_of(network: Network, *, parent: Before | None = None) -> Forecast:
    return forecast(network, experts=Lineage.of(network), images=100, parent=parent)


def before(spec: NetworkSpec) -> Before:
    return Before(spec=spec.until(1), expert_bytes=1000, classifier_bytes=100)


def test_costs_grow_with_every_task() -> None:
    network = grown([2, 1])
    told = told_of(network, parent=before(network.spec))
    assert told.parent is not None
    assert told.following is not None
    assert told.parent.gflop < told.version.gflop < told.following.gflop
    assert told.parent.bytes < told.version.bytes < told.following.bytes
    assert "times what it takes now" in str(told)
    assert "one more task like it would add" in str(told)


def test_an_extension_adds_a_classifier_and_no_task_is_forecast_after_it(tmp_path: Path) -> None:
    store, progress = tmp_path / "models", Listening()
    add_task(asked(store, write_classes(tmp_path / "a", ["a", "b"])), progress=Listening())
    more = write_classes(tmp_path / "more", ["a"], images=30)
    outcome = add_task(asked(store, more, extend=True, shape=NetworkShape()), progress=progress)
    told = outcome.forecast
    assert told is not None
    assert told.following is None
    assert told.delta_bytes == outcome.as_json()["delta_bytes"]
    assert told.version.bytes == total_bytes(outcome.manifest.model_shards)
    assert told.parent is not None
    assert (told.parent.bytes, told.parent.gflop) == (told.version.bytes, told.version.gflop)
    assert "one more task" not in str(told)
    assert "GFLOP an image as now" in str(told)


def test_only_the_version_itself_is_timed_and_only_its_own_work_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By CPU time of one thread: a machine that is busy stretches the clock a hundredfold."""
    threads = torch.get_num_threads()
    times_s = iter(range(100))
    monkeypatch.setattr(
        "trainer.evaluation.forecast.time.thread_time", lambda: 1e-3 * next(times_s)
    )
    network = grown([2, 1])
    monkeypatch.setattr("trainer.evaluation.forecast.MOST_RUNS", 7)
    told = told_of(network, parent=before(network.spec))
    assert told.version.latency_ms == pytest.approx(1.0)
    assert told.parent is not None
    assert told.following is not None
    assert (told.parent.latency_ms, told.following.latency_ms) == (None, None)
    assert "here about 1 ms of one core" in str(told)
    assert torch.get_num_threads() == threads


def test_operations_are_those_of_the_form_that_is_served() -> None:
    network = grown([1])
    spec = network.spec
    width, patches, heads = spec.width_of(0), spec.patches, spec.experts[0].attention_heads
    embed = patches * width * 3 * spec.patch_size**2
    linear = 2 * width * spec.mlp_ratio * width
    block = patches * (4 * width**2 + 2 * patches * width + linear)
    # The token projects itself alone, and reads the positions as they are.
    last = 4 * width**2 + 2 * (patches + 1) * heads * width + linear
    products = embed + spec.depth * block + last + width * len(spec.classes)
    told = told_of(network)
    assert told.version.gflop * 1e9 == pytest.approx(2 * products)


def test_a_forecast_draws_no_random_numbers() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    network = grown([1])
    torch.manual_seed(5)
    told_of(network)
    assert torch.equal(torch.rand(3), expected)
