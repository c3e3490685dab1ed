from __future__ import annotations

from dataclasses import replace

import pytest

from dne_serve.rollout.memory import pass_bytes, scratch_numbers
from model_store.errors import SpecInvalid
from model_store.inference.forward import Lineage
from model_store.network.network import Network
from model_store.spec import Backbone, ExpertSpec, NetworkSpec, TaskSpec
from model_store.store.store import Store
from tests.live_server import Live, assert_problem, png
from tests.tiny_versions import publish_tiny
from trainer.request import PRESETS

ODD = NetworkSpec(image_size=32, patch_size=1, depth=1, head_width=4)
"""A quarter of a megabyte of weights, and a thousand rows for every image."""


def grown(spec: NetworkSpec, heads: list[int]) -> NetworkSpec:
    for index, count in enumerate(heads):
        classes = (f"c{index}",)
        task = TaskSpec(name=f"t{index}", classes=classes, expert=ExpertSpec(heads=count))
        spec = spec.expand(task)
    return spec


@pytest.mark.parametrize("heads", [[2], [1, 1, 1], [2, 3, 3, 1], [4, 1, 1, 2, 2]])
def test_the_scratch_memory_is_counted_as_it_is_laid_out(heads: list[int]) -> None:
    spec = grown(NetworkSpec(image_size=8, patch_size=4, depth=1, head_width=4), heads)
    network = Network(spec.until(0))
    for task in spec.tasks:
        network.expand(task)
    layout = Lineage.of(network)._layout(rows=7)
    assert scratch_numbers(spec, rows=7) == layout.size


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_a_backbone_takes_more_than_a_plain_first_expert(backend: str) -> None:
    plain = NetworkSpec(image_size=32, patch_size=4, depth=1, token="in-sequence")
    turned = replace(plain, backbone=Backbone(registers=64, rotary=True, activation="swiglu"))
    few, many = (
        pass_bytes(grown(spec, [4, 1]), batch=4, backend=backend) for spec in (plain, turned)
    )
    assert many > 2 * few


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("backend", "workers"), [("torch", 1), ("onnx", 2)])
def test_ordinary_networks_fit_into_a_small_machine(
    preset: str, backend: str, workers: int
) -> None:
    """Ten tasks with the heads that the trainer gives them, in what 2 GiB leave."""
    sizes = PRESETS[preset]
    first = NetworkSpec(image_size=sizes.image_size, patch_size=sizes.patch_size, depth=sizes.depth)
    spec = grown(first, [sizes.heads, *[4] * 9])
    assert pass_bytes(spec, batch=16, backend=backend, workers=workers) < 700 << 20


def test_small_patches_and_many_heads_take_memory_that_the_weights_do_not_show() -> None:
    odd = grown(ODD, [1, 64])
    assert 4 * odd.parameters < 4 << 20
    assert pass_bytes(odd, batch=16, backend="torch") > 1 << 30
    assert pass_bytes(odd, batch=16, backend="onnx", workers=2) > 4 << 30


def test_a_version_whose_batches_would_not_fit_is_refused_with_the_numbers(
    live: Live, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.serving.shared.memory, "_available", lambda: 100 << 20)
    odd = publish_tiny(store, tasks=[("a", ["x"]), ("b", ["y"])], spec=ODD, heads=16)
    answer = live.admin("/promote", to=odd.version)
    assert_problem(answer, 503, says="MiB more for a batch of images, and 100.0 MiB are free")
    assert "not moved" in answer.json()["detail"]
    assert_problem(live.predict(png(), query=f"?version={odd.version}"), 503, says="--max-batch")
    assert live.predict(png()).json()["version"] == 2
    assert sum(ref.bytes for ref in odd.model_shards) < 2 << 20


def test_an_image_of_too_many_patches_is_no_network() -> None:
    NetworkSpec(image_size=4096, patch_size=16, depth=1)
    with pytest.raises(SpecInvalid, match="an image of 262144 patches is too large"):
        NetworkSpec(image_size=512, patch_size=1, depth=1)
