"""Variants of the network compute what their formulas say."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from lab.methods.dne import Dne, DneOptions
from lab.presets import PRESETS
from lab.variants.design import NETWORKS, NetworkName, network_type
from lab.variants.mixing import FlexibleAttention, Matrices, mixing_layer
from lab.variants.spatial import (
    GROUPS,
    SpatialTask,
    SpatialTaskAttention,
    attention_by_group,
    group_masks,
)
from model_store.network.layers import TaskAttention
from model_store.network.network import Network
from model_store.spec import ExpertSpec, NetworkSpec, TaskSpec


def _softmax(scores: list[float]) -> Tensor:
    powers = [math.exp(one - max(scores)) for one in scores]
    return torch.tensor([one / sum(powers) for one in powers])


def grown(name: NetworkName, *, heads: int = 1, tasks: int = 3, first: int = 2) -> Network:
    """Grow a network of a few tasks on 8×8 images, with random task attention."""
    torch.manual_seed(0)
    network = network_type(NETWORKS[name])(
        NetworkSpec(image_size=8, patch_size=4, depth=2, head_width=4)
    )
    for task in range(tasks):
        expert = ExpertSpec(heads=heads if task else first)
        network.expand(TaskSpec(name=f"t{task}", classes=(f"a{task}", f"b{task}"), expert=expert))
    for key, one in network.named_parameters():
        if key.endswith("query"):
            torch.nn.init.normal_(one)
    return network


def images() -> Tensor:
    return torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", get_args(NetworkName))
def test_every_variant_learns_its_newest_expert_and_leaves_the_older_bits(
    name: NetworkName,
) -> None:
    network = grown(name, heads=2)
    before = network.token_slices(images())
    parameters = network.learnable()
    optimiser = torch.optim.SGD(parameters, lr=0.1)
    torch.nn.functional.cross_entropy(network(images()), torch.tensor([0, 3, 5])).backward()
    assert [key for key, one in network.newest.named_parameters() if one.grad is None] == []
    optimiser.step()
    after = network.token_slices(images())
    assert all(torch.equal(*pair) for pair in zip(before[:-1], after[:-1], strict=True))
    assert not torch.equal(before[-1], after[-1])


@pytest.mark.parametrize("name", [*get_args(NetworkName)])
def test_every_variant_begins_with_the_first_expert_of_the_product(name: NetworkName) -> None:
    first = grown(name, tasks=1).state_dict()
    product = grown("dne", tasks=1).state_dict()
    assert first.keys() == product.keys()
    assert all(torch.equal(first[key], one) for key, one in product.items())


def test_a_younger_expert_changes_no_older_slice() -> None:
    for name in get_args(NetworkName):
        two, three = grown(name, heads=2, tasks=2), grown(name, heads=2, tasks=3)
        three.load_state_dict(two.experts.state_dict(prefix="experts."), strict=False)
        for older, same in zip(
            two.token_slices(images()), three.token_slices(images()), strict=False
        ):
            assert torch.equal(older, same), name


def test_attention_of_one_everywhere_is_a_dense_layer() -> None:
    """One own head: the matrices of the source heads, side by side, are one dense layer."""
    torch.manual_seed(0)
    sources = [torch.randn(2, 3, 8), torch.randn(2, 3, 4)]
    dense = mixing_layer("1f", sources=3, heads=1, reads=4, writes=5)
    attention = TaskAttention(sources=3, heads=1, reads=4, writes=5)
    with torch.no_grad():
        attention.scale.fill_(3.0)  # equal attention is 1/3, as the query is zero
        weight = dense.get_parameter("weight")
        attention.value.copy_(weight.T.view(3, 4, 5))
        attention.value_bias[0] = dense.get_parameter("dense_bias").normal_()
    assert torch.allclose(dense(sources), attention(sources), atol=1e-6)


def test_a_shared_dense_layer_multiplies_all_source_heads_by_one_matrix() -> None:
    sources = [torch.randn(2, 3, 8), torch.randn(2, 3, 4)]
    shared = mixing_layer("1s", sources=3, heads=1, reads=4, writes=5)
    weight = shared.get_parameter("weight")
    heads = [sources[0][..., :4], sources[0][..., 4:], sources[1]]
    expected = sum((one @ weight.T for one in heads), start=torch.zeros(2, 3, 5))
    assert torch.allclose(shared(sources), expected, atol=1e-6)


def test_a_dense_layer_without_cross_weights_is_independent() -> None:
    """Zero the columns of the older experts; own columns are those of independent attention."""
    dense, alone = grown("dense-f", heads=2), grown("independent", heads=2)
    weights = dict(alone.state_dict())
    for key, one in dense.state_dict().items():
        if key.endswith(("widen.weight", "narrow.weight")) and not key.startswith("experts.0"):
            own = weights[key]
            one.zero_()[:, -own.shape[1] :] = own
        elif key.endswith("dense_bias"):
            one.copy_(weights[key.replace("dense_bias", "bias")])
        else:
            one.copy_(weights[key])
    assert torch.allclose(dense(images()), alone(images()), atol=1e-5)


def test_task_attention_without_cross_weights_is_independent() -> None:
    torch.manual_seed(0)
    sources = [torch.randn(2, 3, 8), torch.randn(2, 3, 4)]
    layer, alone = TaskAttention(sources=3, heads=1, reads=4, writes=5), torch.nn.Linear(4, 5)
    with torch.no_grad():
        layer.scale.fill_(3.0)
        layer.value.zero_()[-1] = alone.weight.T
        layer.value_bias[-1] = alone.bias
    assert torch.allclose(layer(sources), alone(sources[-1]), atol=1e-6)


@pytest.mark.parametrize("matrices", ["sss", "ffs", "fff", "ssf"])
def test_flexible_attention_is_what_plain_loops_compute(matrices: Matrices) -> None:
    torch.manual_seed(0)
    layer = FlexibleAttention(
        sources=3,
        heads=2,
        reads=4,
        writes=5,
        query_key_a_head=matrices[0] == "f",
        value_a_head=matrices[2] == "f",
    )
    for one in layer.parameters():
        torch.nn.init.normal_(one)
    sources = [torch.randn(2, 3, 4), torch.randn(2, 3, 8)]
    n = torch.cat(sources, dim=-1).view(2, 3, 3, 4)
    out = torch.zeros(2, 3, 2, 5)
    with torch.no_grad():
        for image, place, own in itertools.product(range(2), range(3), range(2)):
            query = n[image, place, 1 + own] @ layer.query[own % len(layer.query)]
            keys = [n[image, place, j] @ layer.key[j % len(layer.key)] for j in range(3)]
            weights = _softmax([float(query @ key) / 2 for key in keys])
            for j in range(3):
                value, bias = (one[j % len(one)] for one in (layer.value, layer.value_bias))
                written = n[image, place, j] @ value + bias
                out[image, place, own] += layer.scale[own] * weights[j] * written
    assert torch.allclose(layer(sources), out.flatten(2), atol=1e-4)


def test_flexible_attention_shared_as_in_the_product_is_the_product_s() -> None:
    torch.manual_seed(0)
    ours = TaskAttention(sources=3, heads=2, reads=4, writes=5)
    flexible = FlexibleAttention(
        sources=3, heads=2, reads=4, writes=5, query_key_a_head=False, value_a_head=True
    )
    with torch.no_grad():
        # The product keeps W_q and W_k to be multiplied from the left.
        flexible.query[0] = ours.query.normal_().T
        flexible.key[0] = ours.key.T
        flexible.value.copy_(ours.value)
    sources = [torch.randn(2, 3, 4), torch.randn(2, 3, 8)]
    assert torch.allclose(ours(sources), flexible(sources), atol=1e-5)


def test_the_groups_of_spatial_task_attention_are_as_large_as_the_paper_counts() -> None:
    heads, places = 4, 9
    masks = group_masks(own=heads, heads=heads, queries=places, positions=places)
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    pairs = heads * places
    assert counts == {
        "SPSH": pairs,
        "SPDH": pairs * (heads - 1),
        "DPSH": pairs * (places - 1),
        "DPDH": pairs * (pairs - heads - places + 1),
    }
    assert sum(counts.values()) == pairs**2


def test_spatial_task_attention_of_the_same_head_is_independent_attention() -> None:
    assert torch.allclose(
        grown("sta-ia", heads=2)(images()), _copied("independent", "sta-ia")(images()), atol=1e-5
    )


def _copied(name: NetworkName, source: NetworkName) -> Network:
    network = grown(name, heads=2)
    network.load_state_dict(grown(source, heads=2).state_dict())
    return network


@pytest.mark.parametrize("kind", ["ia", "spdh", "dpdh", "both"])
def test_spatial_task_attention_is_what_plain_loops_compute(kind: SpatialTask) -> None:
    torch.manual_seed(0)
    layer = SpatialTaskAttention(width=4, heads=2, bias=True, kind=kind)
    # One older head and two own ones, 4 positions, 2 channels a head.
    older, own = torch.randn(3, 1, 1, 4, 2), torch.randn(3, 1, 2, 4, 2)
    q, k, v = torch.cat((older, own), dim=2)[:, 0]
    mixed = torch.zeros(4, 4)
    for head, place in itertools.product(range(2), range(4)):
        pairs = [
            (h, p)
            for h, p in itertools.product(range(3), range(4))
            if (h == 1 + head)
            or (p == place and kind in ("spdh", "both"))
            or (p != place and kind in ("dpdh", "both"))
        ]
        weights = _softmax([float(q[1 + head, place] @ k[h, p]) / math.sqrt(2) for h, p in pairs])
        values = torch.stack([v[h, p] for h, p in pairs])
        mixed[place, 2 * head : 2 * head + 2] = weights @ values
    expected = layer.out(mixed)
    assert torch.allclose(layer([older, own])[0], expected, atol=1e-5)
    assert torch.allclose(layer([older, own], queries=1)[0], expected[:1], atol=1e-5)


def test_the_shares_of_the_groups_add_up_and_absent_groups_have_none() -> None:
    each = attention_by_group(grown("sta-spdh"), images())
    shares, means = (dict(zip(GROUPS, part, strict=True)) for part in each.mean(dim=0).T)
    assert each[:, :, 0].sum(dim=1) == pytest.approx(torch.ones(len(images())))
    assert shares["DPDH"] == means["DPDH"] == 0
    # 4 patches and 4 heads, one of them own: a query has 1, 3 and 3 pairs of these groups.
    assert means["SPSH"] * 1 == pytest.approx(shares["SPSH"])
    assert means["DPSH"] * 3 == pytest.approx(shares["DPSH"])
    assert means["SPDH"] * 3 == pytest.approx(shares["SPDH"])


def test_cross_task_attention_in_all_layers_is_the_product_and_in_none_independent() -> None:
    assert torch.equal(_copied("depth-6", "dne")(images()), grown("dne", heads=2)(images()))
    assert torch.equal(
        _copied("depth-0", "independent")(images()), grown("independent", heads=2)(images())
    )


def test_depth_and_linear_layers_choose_who_reads_across() -> None:
    def across(name: NetworkName) -> list[str]:
        keys = grown(name).newest.state_dict()
        return sorted({key.rsplit(".", 1)[0] for key in keys if key.endswith(".key")})

    assert across("depth-1") == ["blocks.0.narrow", "blocks.0.widen"]
    assert across("fc1") == ["blocks.0.widen", "blocks.1.widen", "class_block.widen"]
    assert across("fc2") == ["blocks.0.narrow", "blocks.1.narrow", "class_block.narrow"]
    assert across("mhsa")[:3] == [
        f"blocks.0.attention.{part}" for part in ("key", "query", "value")
    ]


@pytest.mark.parametrize(("k", "millions"), [(1, 15.70), (2, 16.86), (4, 19.92)])
def test_parameters_after_six_tasks_are_those_of_a_clean_build(k: int, millions: float) -> None:
    preset = PRESETS["paper"]
    with torch.device("meta"):
        method = Dne(preset, DneOptions(k=k, attention="plain"))
        for task in range(6):
            count = preset.step if task else preset.first
            method.expand(tuple(f"{task}-{place}" for place in range(count)))
    assert round(sum(one.numel() for one in method.parameters()) / 1e6, 2) == millions
