"""A low-rank change answers the same before it is merged and after, in every form."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_store.inference.forward import FoldedNetwork
from model_store.network.network import Network
from model_store.spec import NetworkSpec
from tests.model_store.networks import BACKBONES, IN_SEQUENCE, grown, images
from tests.model_store.onnx.test_onnx import run, whole_model
from trainer.growth.low_rank import LowRank, change_layers, changes_of, merge_layers


def changed(geometry: NetworkSpec, *, rank: int = 8, seed: int = 0) -> Network:
    """A network of one expert with a change that is far from none."""
    network = grown([2], geometry=geometry, seed=seed)
    change_layers(network.newest, seed=seed, rank=rank)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in network.newest.modules():
            if isinstance(module, LowRank):
                module.up.copy_(0.1 * torch.randn(module.up.shape, generator=generator))
    return network


@given(
    geometry=st.sampled_from([IN_SEQUENCE, *BACKBONES]),
    rank=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_merged_weights_answer_as_the_change_did(
    geometry: NetworkSpec, rank: int, seed: int
) -> None:
    network, batch = changed(geometry, rank=rank, seed=seed), images()
    with torch.no_grad():
        (before,) = network.token_slices(batch)
        merge_layers(network.newest)
        (after,) = network.token_slices(batch)
    assert torch.allclose(before, after, rtol=0, atol=1e-5 * max(1.0, float(before.abs().max())))
    assert not torch.allclose(
        after, grown([2], geometry=geometry, seed=seed).token_slices(batch)[0]
    )


@pytest.mark.parametrize("geometry", [IN_SEQUENCE, *BACKBONES])
def test_a_change_begins_as_none(geometry: NetworkSpec) -> None:
    network, batch = grown([2], geometry=geometry), images()
    plain = network.token_slices(batch)[0]
    change_layers(network.newest, seed=0)
    assert torch.allclose(network.token_slices(batch)[0], plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("geometry", [IN_SEQUENCE, *BACKBONES])
def test_every_layer_of_a_block_learns_and_nothing_else_but_the_last_norm(
    geometry: NetworkSpec,
) -> None:
    network = changed(geometry)
    names = {name for name, one in network.newest.named_parameters() if one.requires_grad}
    layers = {name.rsplit(".", 1)[0] for name in names if name.endswith((".down", ".up"))}
    assert names == {f"{layer}.{end}" for layer in layers for end in ("down", "up")} | {
        name for name in names if name.startswith("norm.")
    }
    for block in range(geometry.depth):
        for layer in ("attention.qkv", "attention.out", "widen", "narrow"):
            assert f"blocks.{block}.{layer}" in layers
    network.token_slices(images())[0].square().sum().backward()
    for one in changes_of(network.newest):
        assert one.grad is not None
        assert one.grad.abs().sum() > 0


@pytest.mark.parametrize("geometry", [IN_SEQUENCE, *BACKBONES])
def test_a_merged_expert_has_the_tensors_of_the_one_that_it_came_from(
    geometry: NetworkSpec,
) -> None:
    network = changed(geometry)
    merge_layers(network.newest)
    plain = grown([2], geometry=geometry).newest.state_dict()
    merged = network.newest.state_dict()
    assert {name: one.shape for name, one in merged.items()} == {
        name: one.shape for name, one in plain.items()
    }
    assert not any(one.requires_grad for one in network.newest.parameters())


def test_the_weights_below_a_change_stay_to_the_bit() -> None:
    network = grown([2], geometry=IN_SEQUENCE)
    before = copy.deepcopy(network.newest.state_dict())
    change_layers(network.newest, seed=0)
    optimiser = torch.optim.AdamW(changes_of(network.newest), lr=0.1)
    network.token_slices(images())[0].square().sum().backward()
    optimiser.step()
    after = network.newest.state_dict()
    assert all(torch.equal(after[name], one) for name, one in before.items() if "norm." not in name)


@pytest.mark.parametrize("geometry", [IN_SEQUENCE, *BACKBONES])
def test_the_folded_form_and_onnx_agree_with_a_merged_expert(geometry: NetworkSpec) -> None:
    network, batch = changed(geometry), images()
    with torch.no_grad():
        unmerged = network(batch)
        merge_layers(network.newest)
        folded = FoldedNetwork.of(network)(batch)
    bound = 1e-5 * max(1.0, float(unmerged.abs().max()))
    assert torch.allclose(folded, unmerged, rtol=0, atol=bound)
    answered = torch.from_numpy(run(whole_model(network), batch))
    assert torch.allclose(answered, unmerged, rtol=0, atol=bound)
