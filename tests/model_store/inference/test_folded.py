"""The folded form: the same logits as the reference, whatever the network looks like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import geometric_mean
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engine.literal import literal, literal_flops
from model_store.inference.fold import FoldedExpert, fold_expert
from model_store.inference.forward import FoldedNetwork, Lineage
from model_store.inference.stacks import Part, Stack, stack_up
from model_store.inference.workspace import Scratch
from model_store.network.flops import folded_flops
from model_store.network.network import Network
from model_store.spec import NetworkSpec
from tests.model_store.networks import (
    BACKBONES,
    CONVOLVED,
    GATED,
    GEOMETRY,
    IN_SEQUENCE,
    experts_of,
    grown,
    heads_of,
    images,
    task,
)

KINDS: list[dict[str, Any]] = [
    {"token": "class-attention"},
    {"token": "class-attention", "attention": "gated"},
    {"token": "class-attention", "stem": "convolutions"},
    {"token": "in-sequence"},
    *({"token": one.token, "backbone": one.backbone} for one in BACKBONES if not one.readout),
]
GEOMETRIES = st.builds(
    lambda kind, **sizes: NetworkSpec(**kind, **sizes),
    kind=st.sampled_from(KINDS),
    image_size=st.just(8),
    patch_size=st.sampled_from([2, 4, 8]),
    depth=st.integers(1, 3),
    head_width=st.sampled_from([4, 8, 12]),
    mlp_ratio=st.integers(1, 4),
    qkv_bias=st.booleans(),
)
HEADS = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 2, 4])), min_size=1, max_size=6
)


def random_network(geometry: NetworkSpec, heads: Sequence[tuple[int, int]], seed: int) -> Network:
    """Grow a network. `heads` gives the heads and the attention heads of each expert."""
    torch.manual_seed(seed)
    network = Network(geometry)
    for index, (count, attention_heads) in enumerate(heads):
        network.expand(task(f"task{index}", heads=count, attention_heads=attention_heads))
        with torch.no_grad():
            for parameter in network.learnable():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return network.eval()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Give the largest difference, relative to the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


def folded_experts(network: Network) -> list[FoldedExpert]:
    return [
        fold_expert(expert.state_dict(), spec=network.spec, index=index)
        for index, expert in enumerate(network.experts)
    ]


@settings(max_examples=40)
@given(geometry=GEOMETRIES, heads=HEADS, seed=st.integers(0, 1000), batch=st.integers(1, 4))
def test_the_folded_form_is_the_same_function_for_any_spec(
    geometry: NetworkSpec, heads: list[tuple[int, int]], seed: int, batch: int
) -> None:
    network = random_network(geometry, heads, seed).double()
    x = images(batch, seed=seed).double()
    with torch.no_grad():
        assert relative_error(FoldedNetwork.of(network)(x), network(x)) <= 1e-8


@pytest.mark.long
@settings(max_examples=20)
@given(geometry=GEOMETRIES, width=st.sampled_from([16, 32]), heads=HEADS, seed=st.integers(0, 1000))
def test_in_single_precision_logits_stay_within_a_hundred_thousandth(
    geometry: NetworkSpec, width: int, heads: list[tuple[int, int]], seed: int
) -> None:
    network = random_network(replace(geometry, head_width=width), heads, seed)
    x = images(2, seed=seed)
    with torch.no_grad():
        assert relative_error(FoldedNetwork.of(network)(x), network(x)) <= 1e-5


@pytest.mark.long
@settings(max_examples=30)
@given(
    geometry=GEOMETRIES,
    heads=HEADS.filter(lambda tasks: len(tasks) > 1),
    seed=st.integers(0, 1000),
    batch=st.integers(1, 4),
)
def test_an_expert_learns_the_same_from_older_ones_in_folded_form(
    geometry: NetworkSpec, heads: list[tuple[int, int]], seed: int, batch: int
) -> None:
    network = random_network(geometry, heads, seed).double()
    x = images(batch, seed=seed).double()
    older = Lineage.of(network, experts=len(heads) - 1).frozen_context(x)
    parameters = network.learnable()
    found = network.classify(network.token_slices(x, older))
    expected = network(x)
    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad((found * direction).sum(), parameters)
    plain = torch.autograd.grad((expected * direction).sum(), parameters)
    assert relative_error(found.detach(), expected.detach()) <= 1e-8
    scale = max(one.abs().max() for one in plain)
    for one, other in zip(gradients, plain, strict=True):
        assert (one - other).abs().max() <= 1e-8 * scale


@pytest.mark.long
@pytest.mark.parametrize("geometry", [GEOMETRY, IN_SEQUENCE, GATED, CONVOLVED])
def test_many_tasks_whose_parameters_are_far_from_the_start_stay_as_close_to_the_truth(
    geometry: NetworkSpec,
) -> None:
    # Rounding decides which form is closer to the truth for one image: by 22 times for the worst of
    # three. The usual error of fifteen images differs by a factor of two at most, and the geometric
    # mean over 24 networks by a sixteenth.
    ratios = []
    for seed in range(24):
        network = grown([2, 1, 0, 1, 1, 2, 2, 1, 0, 4, 4], geometry=geometry, seed=seed)
        x = images(15, seed=seed)
        with torch.no_grad():
            found, plain = FoldedNetwork.of(network)(x), network(x)
            truth = network.double()(x.double())
        ratios.append(usual_error(found, truth) / usual_error(plain, truth))
    assert geometric_mean(ratios) <= 1.25


def usual_error(found: Tensor, truth: Tensor) -> float:
    """Give the median over images of the root mean square error, relative to the image's logits."""
    error_N = (found.double() - truth).square().mean(1) / truth.square().mean(1)
    return float(error_N.sqrt().median())


def test_logits_of_a_network_that_was_trained_are_those_of_the_reference() -> None:
    network = Network(replace(GEOMETRY, qkv_bias=True))
    labels = torch.arange(12) % 2
    for index, heads in enumerate([3, 1, 2, 1]):
        network.expand(task(f"task{index}", heads=heads))
        optimiser = torch.optim.AdamW(network.learnable(), lr=3e-3)
        for step in range(12):
            x = images(12, seed=step) + labels[:, None, None, None]
            loss = torch.nn.functional.cross_entropy(network(x), labels + 2 * index)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        assert relative_error(FoldedNetwork.of(network)(x), network(x)) <= 1e-5


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="not of the spec's size"):
        FoldedNetwork.of(grown([2, 1]))(images(1)[:, :, :4, :4])


def test_a_version_is_read_off_the_pass_of_a_longer_one() -> None:
    network = grown([2, 1, 2, 2, 1], noise=0.1)
    x = images(4)
    with torch.no_grad():
        token = FoldedNetwork.of(network).lineage.token(x)
        for count in range(1, 5):
            older = Network.assemble(
                network.spec.until(count),
                experts_of(network)[:count],
                heads_of(grown([2, 1, 2, 2, 1][:count], seed=7)),
            )
            expected = older(x)
            assert relative_error(FoldedNetwork.of(older).classify(token), expected) <= 1e-5


def test_old_slices_stay_when_an_expert_is_written_next_to_them() -> None:
    network = grown([2, 1, 1, 1], noise=0.1)
    experts = folded_experts(network)
    x = images(3)
    (part,) = stack_up(network.spec.until(2), experts)
    older = Lineage(network.spec, first=experts[0], parts=[part])
    before = older.token(x)
    for expert in experts[2:]:
        part.stack.append(expert)
    longer = Lineage(
        network.spec, first=experts[0], parts=[Part(stack=part.stack, count=part.stack.count)]
    )
    assert part.stack.count == 3
    assert relative_error(older.token(x), before) <= 1e-5
    assert relative_error(longer.token(x)[:, : before.shape[1]], before) <= 1e-5
    with torch.no_grad():
        expected = torch.cat(network.token_slices(x), dim=-1)
    assert relative_error(longer.token(x), expected) <= 1e-5


def test_room_is_made_once_for_several_experts() -> None:
    experts = folded_experts(grown([2, 1, 1, 1, 1], noise=0.1))
    stack = Stack(before=2, heads=1, attention_heads=1, blocks=3)
    places = []
    for expert in experts[1:]:
        for _ in stack.appending(expert.edges, expert.blocks, room=2):
            pass
        places.append(stack.blocks[0].narrow[0].data_ptr())
    assert len(set(places[:3])) == 1
    assert places[3] != places[2]


def test_the_views_of_a_part_have_the_shapes_of_the_worked_example() -> None:
    geometry = replace(IN_SEQUENCE, head_width=4, mlp_ratio=4)  # 5 positions
    layout = Lineage.of(grown([3, 2, 2, 2], geometry=geometry))._layout(rows=2 * 5)
    (view,) = Scratch().views(layout, like=images(1)).parts
    reader, source = view.readers[1], view.sources[5]
    found = [view.normed_SNC, view.narrow.own_NKD, view.widen.sources_NDH, view.widen.weights_NKH]
    assert [one.shape for one in found] == [(3, 10, 8), (10, 6, 16), (10, 4, 9), (10, 6, 9)]
    found = [view.weights_SkNH, view.read_SkND, view.read_SNC, view.widen.mask_KH]
    assert [one.shape for one in found] == [(3, 2, 10, 9), (3, 2, 10, 4), (3, 10, 8), (6, 9)]
    found = [reader.weights_NkH, reader.normed_N1HD, reader.scaled_NkHD, reader.matrix]
    assert [one.shape for one in found] == [(10, 2, 7), (10, 1, 7, 4), (10, 2, 7, 4), (20, 35)]
    found = [source.value, source.weights_NSk1, source.value_NS1D, source.read_NSkD]
    assert [one.shape for one in found] == [(10, 8), (10, 2, 2, 1), (10, 2, 1, 4), (10, 2, 2, 4)]


def test_branches_share_the_experts_before_the_fork() -> None:
    trunk = grown([2, 1], noise=0.1)
    x, scratch = images(3), Scratch()
    experts = folded_experts(trunk)
    (shared,) = stack_up(trunk.spec, experts)
    lineages = []
    for seed, heads in ((1, 1), (2, 2)):
        branch = Network.assemble(trunk.spec, experts_of(trunk), heads_of(trunk))
        torch.manual_seed(seed)
        branch.expand(task(f"branch{seed}", heads=heads))
        newest = folded_experts(branch)[-1]
        stack = Stack(before=3, heads=heads, attention_heads=heads, blocks=3)
        stack.append(newest)
        parts = [shared, Part(stack=stack, count=1)]
        lineage = Lineage(branch.spec, first=experts[0], parts=parts, scratch=scratch)
        with torch.no_grad():
            expected = torch.cat(branch.token_slices(x), dim=-1)
        lineages.append((lineage, expected))
    for lineage, expected in lineages * 2:
        assert relative_error(lineage.token(x), expected) <= 1e-5


def test_an_expert_that_was_not_finished_leaves_no_trace() -> None:
    network = grown([2, 1, 1], noise=0.1)
    experts = folded_experts(network)
    stranger = folded_experts(grown([2, 1, 1], seed=9))[-1]
    (part,) = stack_up(network.spec.until(2), experts)
    half = part.stack.appending(stranger.edges, stranger.blocks, room=1)
    next(half)
    part.stack.append(experts[2])
    lineage = Lineage(
        network.spec, first=experts[0], parts=[Part(stack=part.stack, count=part.stack.count)]
    )
    x = images(3)
    with torch.no_grad():
        expected = torch.cat(network.token_slices(x), dim=-1)
    assert relative_error(lineage.token(x), expected) <= 1e-5


def test_passes_of_any_size_and_mode_may_follow_each_other() -> None:
    network = grown([2, 1, 2], noise=0.1)
    with torch.inference_mode():
        folded = FoldedNetwork.of(network)
        assert relative_error(folded(images(2)), network(images(2))) <= 1e-5
    assert relative_error(folded(images(5)), network(images(5)).detach()) <= 1e-5
    with torch.no_grad():
        assert relative_error(folded(images(2)), network(images(2))) <= 1e-5
    with torch.inference_mode():
        assert relative_error(folded(images(7)), network(images(7))) <= 1e-5


def test_folding_keeps_nothing_of_the_weights_it_was_given() -> None:
    network = grown([2, 1, 2], noise=0.1)
    x = images(3)
    with torch.no_grad():
        expected = network(x)
        folded = FoldedNetwork.of(network)
        for parameter in network.parameters():
            parameter.zero_()
    assert relative_error(folded(x), expected) <= 1e-5


def added_product_flops(
    x: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], **kwargs: object
) -> int:
    return 2 * a[0] * a[1] * b[1]


def counted_flops(run: Callable[[Tensor], Tensor]) -> int:
    # torch counts attention where it is made of products.
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.addmm_: added_product_flops}
    )
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        run(images(1))
    return counter.get_total_flops()


@pytest.mark.parametrize("geometry", [GEOMETRY, IN_SEQUENCE, GATED, CONVOLVED, *BACKBONES])
@pytest.mark.parametrize("heads", [[3], [3, 1], [4, 2]])
def test_flops_are_those_that_torch_counts(geometry: NetworkSpec, heads: list[int]) -> None:
    network = grown(heads, geometry=geometry)
    # What torch cannot know to be half of a product: scaling and mixing element by element.
    sources, own = sum(heads), heads[-1]
    rows = geometry.positions * (geometry.depth - (geometry.token == "in-sequence")) + 1
    elementwise = rows * 3 * own * sources * geometry.head_width if len(heads) > 1 else 0
    if geometry.backbone is None and geometry.readout is None:
        assert literal_flops(network.spec) == counted_flops(literal(network))
    assert folded_flops(network.spec) == counted_flops(FoldedNetwork.of(network)) + elementwise


def test_the_folded_form_needs_less_than_half_at_26_tasks() -> None:
    spec = NetworkSpec(image_size=32, patch_size=4, depth=5)
    for index in range(26):
        spec = spec.expand(task(f"task{index}", heads=1 if index else 12))
    assert folded_flops(spec) <= 0.5 * literal_flops(spec)


@pytest.mark.parametrize("geometry", [GEOMETRY, IN_SEQUENCE, GATED, CONVOLVED])
def test_large_products_in_16_bits_stay_close_to_the_reference(geometry: NetworkSpec) -> None:
    network = grown([3, 1, 1, 2], geometry=geometry)
    with torch.no_grad():
        expected = network(images(5))
    found = FoldedNetwork.of(network, matmul_dtype=torch.bfloat16)(images(5))
    assert found.dtype == torch.float32
    assert 0 < relative_error(found, expected) < 0.03


def test_only_weights_of_large_products_are_kept_in_16_bits() -> None:
    network = grown([2, 1])
    experts = [
        fold_expert(one.state_dict(), spec=network.spec, index=index, matmul_dtype=torch.bfloat16)
        for index, one in enumerate(network.experts)
    ]
    halved = [
        {name for name, tensor in one.tensors() if tensor.dtype == torch.bfloat16}
        for one in experts
    ]
    attention = {"attention.qkv_CX", "attention.out_CC"}
    first = attention | {"widen.weight_IO", "narrow.weight_IO"}
    later = attention | {"widen.value_HDE", "widen.value_bias_HE", "narrow.value_HDE"}
    blocks = range(len(network.spec.blocks) - 1)  # the last one has one position an image
    assert halved == [
        {f"blocks.{number}.{name}" for number in blocks for name in names}
        for names in (first, later)
    ]
    (part,) = stack_up(network.spec, experts)
    block = part.stack.blocks[0]
    assert {one.dtype for one in (*block.widen, *block.narrow)} == {torch.bfloat16}
    assert block.narrow_bias(1).dtype == torch.float32
