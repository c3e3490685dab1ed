"""Test the backbones: their shapes, their sizes, and the ways they learn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lab.backbones import (
    KINDS,
    BackboneName,
    GrowingLinear,
    PlainNetwork,
    ResNet18,
    ResNet32,
    Transformer,
    sgd,
)
from lab.methods.dne import Dne, DneOptions
from lab.presets import PRESETS
from model_store.network.network import Network

MINI = PRESETS["mini"]


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def test_resnet_18_gives_four_stages_and_the_mean_of_the_last() -> None:
    network = ResNet18(4).eval()
    stages = network.stages(images())
    assert [tuple(one.shape) for one in stages] == [
        (2, 4, 32, 32),
        (2, 8, 16, 16),
        (2, 16, 8, 8),
        (2, 32, 4, 4),
    ]
    assert network.width == 32
    torch.testing.assert_close(network(images()), stages[-1].mean(dim=(2, 3)))


def test_the_full_resnet_18_has_as_many_parameters_as_everywhere() -> None:
    # 11.17 million without the classifier, as in every implementation for CIFAR.
    assert sum(one.numel() for one in ResNet18(64).parameters()) == 11_168_832


def test_resnet_32_has_31_convolutions_on_the_longest_way() -> None:
    network = ResNet32().eval()
    assert tuple(network(images()).shape) == (2, 64)
    ways = [one for one in network.modules() if isinstance(one, nn.Conv2d)]
    assert len([one for one in ways if one.kernel_size == (3, 3)]) == 31


def test_a_transformer_computes_the_token_of_the_product_network() -> None:
    torch.manual_seed(0)
    method = Dne(MINI, DneOptions())
    method.expand(("cat", "dog"))
    alone = Transformer(MINI)
    alone.load_state_dict(method.network.newest.state_dict())
    assert torch.equal(alone(images()), method.network.token_slices(images())[0])


def test_a_plain_transformer_names_and_orders_its_tensors_as_the_product() -> None:
    method = Dne(MINI, DneOptions())
    method.expand(("cat", "dog"))
    plain = PlainNetwork(Transformer(MINI))
    plain.heads.grow(2)
    assert _shapes(plain) == _shapes(method.network)
    assert [one.shape for one in plain.learnable()] == [
        one.shape for one in method.network.learnable()
    ]
    assert KINDS["transformer"].base_with("cross-entropy") == method.base


def _shapes(network: Network | PlainNetwork) -> dict[str, torch.Size]:
    return {name: one.shape for name, one in network.state_dict().items()}


def test_new_rows_leave_the_old_logits_alone() -> None:
    linear, features = GrowingLinear(5), torch.randn(3, 5)
    linear.grow(2)
    before = linear(features)
    linear.grow(4)
    assert linear(features).shape == (3, 6)
    assert torch.equal(linear(features)[:, :2], before)


def test_sgd_spares_norms_and_biases() -> None:
    network = PlainNetwork(ResNet18(4))
    network.heads.grow(2)
    optimiser = sgd()(network, network.learnable(), 0.1)
    decays = {
        id(p): group["weight_decay"] for group in optimiser.param_groups for p in group["params"]
    }
    for name, one in network.named_parameters():
        matrix = one.ndim > 1
        assert decays[id(one)] == (5e-4 if matrix else 0.0), name
    assert optimiser.param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_a_step_lowers_the_loss(name: BackboneName) -> None:
    torch.manual_seed(0)
    network = PlainNetwork(KINDS[name].make(MINI))
    network.heads.grow(2)
    labels = torch.tensor([0, 1])
    optimiser = KINDS[name].optimiser(MINI)(network, network.learnable(), 0.01)
    before = nn.functional.cross_entropy(network(images()), labels)
    before.backward()
    optimiser.step()
    assert nn.functional.cross_entropy(network(images()), labels) < before
