from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_store.manifest import total_bytes
from tests.model_store.networks import grown
from tests.trainer.folders import Listening, asked, write_classes
from trainer.add_task import add_task
from trainer.forecast import forecast
from trainer.presets import Shape


def test_the_forecast_is_what_is_then_published(tmp_path: Path) -> None:
    store = tmp_path / "models"
    for name, shape in (("letters", None), ("signs", Shape())):
        data = write_classes(tmp_path / name, [f"{name} 1", f"{name} 2"])
        progress = Listening()
        others = {"shape": shape} if shape else {}
        outcome = add_task(asked(store, data, **others), progress=progress)
        told = outcome.forecast
        assert told.version.bytes == total_bytes(outcome.manifest.model_shards)
        assert told.delta_bytes == outcome.as_json()["delta_bytes"]
        assert str(told) in progress.notes
        assert (told.parent is None) == (outcome.parent is None)
    notes = [one.split(" ")[0] for one in progress.notes]
    assert notes.index("the") < notes.index("learning")  # told before, not after


def test_costs_grow_with_every_task() -> None:
    network = grown([2, 1])
    told = forecast(network, images=100, parent=network.spec.until(1), parent_bytes=1000)
    assert told.parent is not None
    assert told.parent.gflop < told.version.gflop < told.following.gflop
    assert told.parent.bytes < told.version.bytes < told.following.bytes
    assert told.version.latency_ms > 0
    assert "one more task like it would add" in str(told)


def test_operations_are_those_of_the_form_that_is_served() -> None:
    network = grown([1])
    spec = network.spec
    width, patches, heads = spec.width_of(0), spec.patches, spec.tasks[0].expert.attention_heads
    embed = patches * width * 3 * spec.patch_size**2
    linear = 2 * width * spec.mlp_ratio * width
    block = patches * (4 * width**2 + 2 * patches * width + linear)
    # The token projects itself alone, and reads the positions as they are.
    last = 4 * width**2 + 2 * (patches + 1) * heads * width + linear
    products = embed + spec.depth * block + last + width * len(spec.classes)
    told = forecast(network, images=100, parent=None, parent_bytes=0)
    assert told.version.gflop * 1e9 == pytest.approx(2 * products)


def test_a_forecast_draws_no_random_numbers() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    network = grown([1])
    torch.manual_seed(5)
    forecast(network, images=100, parent=None, parent_bytes=0)
    assert torch.equal(torch.rand(3), expected)
