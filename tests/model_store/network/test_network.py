"""The network: faithful to the paper, and frozen where it says so."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from model_store.errors import SpecInvalid, WrongUsage
from model_store.network.device import choose_device
from model_store.network.gated import GatedAttention, local_start, offsets
from model_store.network.layers import TaskAttention
from model_store.network.network import Network
from model_store.spec import Backbone, ExpertSpec, NetworkSpec
from tests.model_store import paper
from tests.model_store.networks import (
    BACKBONES,
    CONVOLVED,
    GATED,
    GEOMETRY,
    IN_SEQUENCE,
    grown,
    images,
    task,
)


@pytest.mark.parametrize("geometry", [GEOMETRY, IN_SEQUENCE, GATED, CONVOLVED])
@pytest.mark.parametrize("heads", [[2], [2, 1], [3, 1, 2], [2, 0, 1, 0]])
def test_the_network_agrees_with_the_papers_equations_in_plain_loops(
    heads: list[int], geometry: NetworkSpec
) -> None:
    network = grown(heads, geometry=geometry).double()
    batch = images(2).double()
    torch.set_default_dtype(torch.float64)
    try:
        weights = dict(network.state_dict())
        expected = torch.stack([paper.logits(network, weights, image) for image in batch])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(network(batch), expected, rtol=0, atol=1e-10)
    assert expected.abs().max() > 0.1  # not a comparison of zeros


@pytest.mark.parametrize("geometry", [GEOMETRY, IN_SEQUENCE, GATED, CONVOLVED])
def test_gradients_agree_with_plain_loops_and_are_zero_for_everything_frozen(
    geometry: NetworkSpec,
) -> None:
    network = grown([2, 1, 2], geometry=geometry).double()
    image = images(1).double()
    direction = torch.randn(len(network.spec.classes), dtype=torch.float64)
    (network(image)[0] @ direction).backward()
    torch.set_default_dtype(torch.float64)
    try:
        weights = {
            name: tensor.detach().clone().requires_grad_()
            for name, tensor in network.state_dict().items()
        }
        (paper.logits(network, weights, image[0]) @ direction).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in network.named_parameters():
        if name.startswith(("experts.0.", "experts.1.")):
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert torch.allclose(parameter.grad, weights[name].grad, rtol=1e-8, atol=1e-10), name
    moved = [p.grad.abs().max() for p in network.learnable() if p.grad is not None]
    assert min(moved) > 0


def test_the_heads_of_gated_attention_begin_on_a_grid_around_the_patch() -> None:
    scores_QHP = local_start(9) @ offsets(25).mT
    middle = 12
    assert scores_QHP[middle].argmax(dim=-1).tolist() == [6, 11, 16, 7, 12, 17, 8, 13, 18]
    assert local_start(1).tolist() == [[0.0, 0.0, -1.0]]
    assert local_start(12)[9:].tolist() == [[0.0, 0.0, 0.0]] * 3


def test_gated_attention_answers_the_first_queries_alone_alike() -> None:
    torch.manual_seed(0)
    layer = GatedAttention(width=6, heads=3, bias=True)
    x_BPC = torch.randn(2, 9, 6)
    assert torch.allclose(layer(x_BPC, queries=2), layer(x_BPC)[:, :2], atol=1e-6)


def test_task_attention_alone_agrees_with_plain_loops_including_gradients() -> None:
    torch.manual_seed(3)
    layer = TaskAttention(sources=5, heads=2, reads=4, writes=6).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter))
    older = torch.randn(1, 1, 12, dtype=torch.float64, requires_grad=True)
    own = torch.randn(1, 1, 8, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(12, dtype=torch.float64)
    out = layer([older, own])[0, 0]
    got = torch.autograd.grad(out @ direction, [older, own, *layer.parameters()])
    torch.set_default_dtype(torch.float64)
    try:
        weights: dict[str, torch.Tensor] = {
            f"ta.{name}": parameter for name, parameter in layer.named_parameters()
        }
        sources = [list(older[0, 0].split(4)), list(own[0, 0].split(4))]
        plain = torch.cat(paper.task_attention(sources, weights, "ta"))
        expected = torch.autograd.grad(plain @ direction, [older, own, *layer.parameters()])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(out, plain, rtol=0, atol=1e-12)
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("geometry", [GEOMETRY, IN_SEQUENCE, GATED, CONVOLVED])
def test_old_features_are_bit_identical_after_any_number_of_expansions(
    geometry: NetworkSpec,
) -> None:
    network = grown([2, 1], geometry=geometry)
    batch = images(4)
    with torch.no_grad():
        before = network.token_slices(batch)
        for index, heads in enumerate([1, 2, 1]):
            network.expand(task(f"later{index}", heads=heads))
            optimiser = torch.optim.AdamW(network.learnable(), lr=0.1)
            with torch.enable_grad():
                network(batch).square().sum().backward()
            optimiser.step()
            optimiser.zero_grad()
        after = network.token_slices(batch)
    assert len(after) == 5
    for old, new in zip(before, after, strict=False):
        assert torch.equal(old, new)


def test_expanding_moves_no_old_logit() -> None:
    network = grown([2, 1])
    batch = images(4)
    with torch.no_grad():
        before = network(batch)
        network.expand(task("new", heads=2, classes=3))
        after = network(batch)
    assert after.shape == (4, 7)
    assert torch.allclose(after[:, :4], before, rtol=0, atol=1e-6)


def test_old_task_heads_keep_their_bias_and_get_zero_columns() -> None:
    network = grown([2])
    head = network.heads[0]
    assert isinstance(head, torch.nn.Linear)
    weight, bias = head.weight.clone(), head.bias.clone()
    network.expand(task("new", heads=1))
    wider = network.heads[0]
    assert isinstance(wider, torch.nn.Linear)
    assert torch.equal(wider.bias, bias)
    assert torch.equal(wider.weight[:, : weight.shape[1]], weight)
    assert not wider.weight[:, weight.shape[1] :].any()


def test_the_heads_of_an_older_version_read_the_slices_they_know() -> None:
    network = grown([2, 1])
    batch = images(2)
    with torch.no_grad():
        before = network(batch)
        old_heads = network.heads
        network.expand(task("new", heads=1))
        slices = network.token_slices(batch)
        assert torch.equal(network.classify(slices, old_heads), before)


def test_scale_starts_at_the_number_of_older_heads() -> None:
    network = Network(GEOMETRY)
    network.expand(task("a", heads=3))
    network.expand(task("b", heads=2))
    for name, parameter in network.named_parameters():
        if name.startswith("experts.1.") and name.endswith(".scale"):
            assert parameter.tolist() == [3.0, 3.0]


def test_tuning_may_change_the_token_its_block_and_the_heads_only() -> None:
    network = grown([2, 1])
    allowed = {id(parameter) for parameter in network.tunable()}
    names = {name for name, p in network.named_parameters() if id(p) in allowed}
    assert names == {
        name
        for name, _ in network.named_parameters()
        if name.startswith(("experts.1.class_block.", "heads.")) or name == "experts.1.token"
    }


def test_with_the_token_in_the_sequence_tuning_may_change_the_last_block() -> None:
    network = grown([2, 1], geometry=IN_SEQUENCE)
    allowed = {id(parameter) for parameter in network.tunable()}
    names = {name for name, p in network.named_parameters() if id(p) in allowed}
    assert names == {
        name
        for name, _ in network.named_parameters()
        if name.startswith(("experts.1.blocks.1.", "heads.")) or name == "experts.1.token"
    }


def test_neighbouring_experts_of_equal_shape_are_a_run_and_the_first_stands_alone() -> None:
    spec = grown([1, 1, 1, 2, 2, 1]).spec
    runs = spec.runs()
    assert [tuple(run.experts) for run in runs] == [(0,), (1, 2), (3, 4), (5,)]
    assert [(run.before, run.end) for run in runs] == [(0, 1), (1, 3), (3, 7), (7, 8)]
    assert [run.sources(0) for run in runs] == [spec.source_heads(run.experts[0]) for run in runs]
    assert spec.run_of(4) == runs[2]
    assert spec.until(0).runs() == ()


def test_an_expert_may_cut_its_own_attention_in_another_way_than_it_is_read() -> None:
    network = Network(IN_SEQUENCE)
    network.expand(task("first", heads=6, attention_heads=3))
    network.expand(task("second", heads=1))
    network, batch = network.double().eval(), images(1).double()
    assert network._experts()[0].patch_block(0).attention.heads == 3
    assert network.spec.source_heads(1) == 7
    torch.set_default_dtype(torch.float64)
    try:
        expected = paper.logits(network, dict(network.state_dict()), batch[0])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(network(batch)[0], expected, rtol=0, atol=1e-10)
    with pytest.raises(SpecInvalid, match="cannot be cut into 5 attention heads"):
        GEOMETRY.expand(task("odd", heads=2, attention_heads=5))


def test_the_auxiliary_head_has_one_output_more_than_the_newest_task_has_classes() -> None:
    network = grown([2, 1])
    auxiliary = network.auxiliary_head()
    assert (auxiliary.in_features, auxiliary.out_features) == (network.spec.token_width, 3)


def test_forward_leaves_nothing_behind() -> None:
    network = grown([2, 1])
    before = {name: set(vars(module)) for name, module in network.named_modules()}
    network(images(1))
    assert {name: set(vars(module)) for name, module in network.named_modules()} == before


@pytest.mark.parametrize(
    "geometry",
    [
        NetworkSpec(image_size=12, patch_size=3, depth=1, head_width=4, mlp_ratio=1),
        NetworkSpec(image_size=8, patch_size=4, depth=2, head_width=8, token="in-sequence"),
        NetworkSpec(
            image_size=4, patch_size=4, depth=3, head_width=16, mlp_ratio=3, qkv_bias=False
        ),
        NetworkSpec(image_size=12, patch_size=4, depth=3, head_width=4, attention="gated"),
    ],
)
def test_the_spec_names_every_tensor_of_any_geometry(geometry: NetworkSpec) -> None:
    network = grown([2, 1, 3], geometry=geometry)
    spec = network.spec
    expected = dict(spec.classifier_tensors())
    for index in range(3):
        expected |= spec.expert_tensors(index)
    assert {name: tuple(t.shape) for name, t in network.state_dict().items()} == expected
    assert spec.parameters == sum(parameter.numel() for parameter in network.parameters())
    assert network(images(2, size=geometry.image_size)).isfinite().all()


def test_the_paper_preset_has_the_sizes_the_paper_implies() -> None:
    spec = NetworkSpec(image_size=32, patch_size=4, depth=5).expand(
        task("first", heads=12, classes=50)
    )
    for index in range(5):
        spec = spec.expand(task(f"later{index}", heads=1, classes=10))
    assert spec.parameters == pytest.approx(15.7e6, rel=0.005)
    second = sum(math.prod(shape) for shape in spec.expert_tensors(1).values())
    third = sum(math.prod(shape) for shape in spec.expert_tensors(2).values())
    assert second == pytest.approx(0.89e6, rel=0.005)
    assert third - second == pytest.approx(0.05e6, rel=0.01)


def test_devices_are_chosen_in_one_place() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(WrongUsage, match="not one of"):
        choose_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(WrongUsage, match="no GPU"):
            choose_device("cuda")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"image_size": 10}, "cannot be cut into patches of 4"),
        ({"patch_size": 0}, "patch_size must be between"),
        ({"depth": -1}, "depth must be between"),
        ({"head_width": 1 << 20}, "head_width must be between"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps"),
        ({"attention": "loud"}, "attention 'loud' is not one of plain, gated"),
        ({"attention": "gated", "token": "in-sequence"}, "no place for a token"),
        ({"attention": "gated", "image_size": 1024}, "among 65536 patches is too large"),
        ({"backbone": Backbone()}, "a plain backbone is not described"),
        ({"backbone": Backbone(registers=1)}, "token pooling does not go with token 'class-att"),
        (
            {"backbone": Backbone(pooling="attention"), "attention": "gated"},
            "attention pooling does not go with token 'class-attention' and gated attention",
        ),
        (
            {"backbone": Backbone(pooling="attention"), "token": "in-sequence"},
            "attention pooling does not go with token 'in-sequence'",
        ),
    ],
)
def test_a_geometry_that_cannot_be_built_fails_with_the_reason(
    change: dict[str, float | str], reason: str
) -> None:
    sizes: dict[str, float | str] = {"image_size": 8, "patch_size": 4, "depth": 1, **change}
    with pytest.raises(SpecInvalid, match=reason):
        NetworkSpec(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"registers": -1}, "registers must be between 0 and 1024"),
        ({"registers": 1025}, "registers must be between 0 and 1024"),
        ({"hidden_norm": -1}, "hidden_norm must be 0 or more"),
        ({"activation": "relu"}, "activation 'relu' is not one of gelu, quick-gelu"),
        ({"pooling": "max"}, "pooling 'max' is not one of token, mean, token-and-mean, attention"),
        ({"pooling": "attention", "rotary": True}, "attention pooling has no registers, no rotary"),
    ],
)
def test_a_backbone_that_cannot_be_built_fails_with_the_reason(
    kind: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SpecInvalid, match=reason):
        Backbone(**kind)


def test_rotary_heads_have_pairs_of_channels() -> None:
    geometry = replace(IN_SEQUENCE, head_width=3, backbone=Backbone(rotary=True))
    with pytest.raises(SpecInvalid, match="an even number of channels"):
        geometry.expand(task("a", heads=1))


def test_a_norm_has_no_more_channels_than_there_are() -> None:
    geometry = replace(IN_SEQUENCE, backbone=Backbone(hidden_norm=17))
    geometry.expand(task("a", heads=2))
    with pytest.raises(SpecInvalid, match="hidden_norm is more than the hidden channels"):
        geometry.expand(task("a", heads=1))


@pytest.mark.parametrize("geometry", BACKBONES)
def test_the_tensors_of_a_backbone_are_those_that_the_spec_names(geometry: NetworkSpec) -> None:
    network = grown([2, 1], geometry=geometry)
    shapes = {name: tuple(one.shape) for name, one in network.state_dict().items()}
    named = network.spec.classifier_tensors()
    for index in (0, 1):
        named |= network.spec.expert_tensors(index)
    assert shapes == named
    assert network.spec.parameters == sum(one.numel() for one in network.parameters())


def test_tasks_that_cannot_be_learnt_fail_with_the_reason() -> None:
    with pytest.raises(SpecInvalid, match="'a-0' is repeated"):
        GEOMETRY.expand(task("a", heads=1)).expand(
            task("b", heads=1).__class__(
                name="b", classes=("a-0",), expert=task("b", heads=1).expert
            )
        )
    with pytest.raises(SpecInvalid, match="heads of an expert"):
        ExpertSpec(heads=0)
    with pytest.raises(SpecInvalid, match="the first task has no expert"):
        GEOMETRY.expand(task("a", heads=0))
    with pytest.raises(SpecInvalid, match="task 'a' has an expert"):
        GEOMETRY.expand(task("a", heads=1)).deepen(ExpertSpec(heads=1))
    with pytest.raises(SpecInvalid, match="no classes"):
        task("a", heads=1, classes=0)
    with pytest.raises(SpecInvalid, match="printable"):
        task("a\nb", heads=1)


def test_a_task_without_an_expert_adds_a_head_and_nothing_else() -> None:
    network = grown([2, 1])
    batch = images(2)
    with torch.no_grad():
        before = network(batch)
        network.expand(task("quick", heads=0))
        assert torch.equal(network(batch)[:, : before.shape[1]], before)
    assert len(network.experts) == 2
    assert network.learnable() == list(network.heads.parameters())
    assert network.spec.expert_tensors(1) == grown([2, 1]).spec.expert_tensors(1)


def test_an_expert_that_comes_later_changes_no_logit_before_it_learns() -> None:
    network = grown([2, 1, 0, 0])
    batch = images(2)
    with torch.no_grad():
        before, slices = network(batch), network.token_slices(batch)
        network.deepen(ExpertSpec(heads=1))
        *older, newest = network.token_slices(batch)
        assert all(map(torch.equal, older, slices))
        # A product with more columns may be summed in another order: the zeros are what is exact.
        weights = [one for name, one in network.heads.named_parameters() if "weight" in name]
        assert not any(one[:, -newest.shape[-1] :].any() for one in weights)
        torch.testing.assert_close(network(batch), before, rtol=0, atol=1e-5)
    spec = network.spec
    assert [one.expert is not None for one in spec.tasks] == [True, True, False, True]
    assert [one.name for one in spec.tasks_of_newest_expert] == ["task2", "task3"]
    assert network.auxiliary_head().out_features == 1 + 4
    assert spec.tasks_without_expert == ()
    assert network.learnable()[0] is next(network.newest.parameters())


def test_a_spec_is_cut_after_an_expert() -> None:
    spec = grown([2, 0, 1, 0, 2]).spec
    assert [len(spec.until(count).tasks) for count in range(4)] == [0, 1, 3, 5]
    assert [one.name for one in spec.until(2).tasks] == ["task0", "task1", "task2"]
    assert [one.name for one in grown([2, 0, 1, 0, 0]).spec.tasks_without_expert] == [
        "task3",
        "task4",
    ]
