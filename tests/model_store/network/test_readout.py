"""The slice of a pre-trained first expert with features of earlier blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from model_store.errors import SpecInvalid
from model_store.inference.forward import FoldedNetwork, Lineage
from model_store.network.network import Network
from model_store.records.manifest import geometry_of, spec_of
from model_store.spec import Backbone, NetworkSpec, Readout
from tests.model_store.networks import GEOMETRY, IN_SEQUENCE, experts_of, grown, images, task

READ = replace(
    IN_SEQUENCE,
    depth=4,
    patch_size=2,
    backbone=Backbone(registers=2, pooling="token-and-mean"),
    readout=Readout(blocks=(1, 3), grid_block=3, grid=3),
)


def read_in_numpy(network: Network, pixels: torch.Tensor) -> np.ndarray:
    """The readout by its definition: rows of single blocks, means of patches, cells of a grid."""
    expert, spec = experts_of(network)[0], network.spec
    assert spec.readout is not None
    side, found = spec.image_size // spec.patch_size, []
    with torch.no_grad():
        rows = expert.embed(pixels)
        for number in range(1, spec.depth):
            block = expert.patch_block(number - 1)
            rows = block.mix(block.attend(rows), ()).out
            if number not in spec.readout.blocks:
                continue
            out = rows.double().numpy()
            out = out - out.mean(axis=-1, keepdims=True)
            out /= np.sqrt((out**2).mean(axis=-1, keepdims=True) + spec.layer_norm_eps)
            patches = out[:, 1 : 1 + side * side]
            found += [out[:, 0], patches.mean(axis=1)]
            if number == spec.readout.grid_block:
                square = patches.reshape(len(out), side, side, -1)
                cells = spec.readout.grid
                for down in range(cells):
                    for along in range(cells):
                        top, bottom = down * side // cells, -(-(down + 1) * side // cells)
                        left, right = along * side // cells, -(-(along + 1) * side // cells)
                        found.append(square[:, top:bottom, left:right].mean(axis=(1, 2)))
    return np.concatenate(found, axis=1)


def test_a_readout_is_what_its_definition_gives() -> None:
    network, pixels = grown([2], geometry=READ), images(2)
    spec = network.spec
    with torch.no_grad():
        [whole] = network.token_slices(pixels)
    assert whole.shape[1] == spec.slice_width(0) == spec.narrow_width + spec.readout_width
    found = whole[:, spec.narrow_width :].numpy()
    assert np.abs(found - read_in_numpy(network, pixels)).max() < 1e-5


def test_a_grid_whose_cells_share_patches_is_that_of_torch() -> None:
    network, pixels = grown([2], geometry=READ), images(2)
    cells = torch.from_numpy(read_in_numpy(network, pixels))[:, -9 * 16 :].view(2, 9, 16)
    whole = torch.from_numpy(np.arange(16.0)).view(1, 1, 4, 4)
    pooled = F.adaptive_avg_pool2d(whole, 3).flatten()
    shares = network.readout.get_buffer("shares_3")[2:, 1:17].double()
    assert cells.shape == (2, 9, 16)
    assert torch.allclose(shares @ whole.flatten(), pooled)


def test_the_last_block_comes_first_and_is_that_of_a_narrow_network() -> None:
    wide = grown([2, 1], geometry=READ)
    narrow = grown([2, 1], geometry=replace(READ, readout=None))
    narrow.experts.load_state_dict(wide.experts.state_dict())
    width = narrow.spec.narrow_width
    with torch.no_grad():
        one, other = wide.token_slices(images()), narrow.token_slices(images())
    assert torch.equal(one[0][:, :width], other[0])
    assert torch.equal(one[1], other[1])


def test_a_readout_stays_bit_identical_while_the_network_grows() -> None:
    network = grown([2], geometry=READ)
    with torch.no_grad():
        before = network.token_slices(images())[0]
        network.expand(task("b", heads=1))
        network.expand(task("c", heads=0))
        after = network.token_slices(images())[0]
    assert torch.equal(before, after)


@pytest.mark.parametrize("heads", [[2], [2, 1, 1]])
def test_the_folded_form_reads_the_same(heads: list[int]) -> None:
    network = grown(heads, geometry=READ)
    with torch.no_grad():
        expected = torch.cat(network.token_slices(images()), dim=1)
        found = Lineage.of(network).token(images())
        logits = FoldedNetwork.of(network)(images())
    assert (found - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))
    assert (logits - network(images())).abs().max() < 1e-4


def test_a_narrowed_network_reads_the_last_block_alone() -> None:
    network = grown([2], geometry=READ)
    with torch.no_grad():
        expected = network.token_slices(images())[0][:, : network.spec.narrow_width]
        kept = network.heads[0].get_parameter("weight")[:, : network.spec.narrow_width].clone()
        network.narrow()
        [found] = network.token_slices(images())
    assert network.spec.readout is None
    assert torch.equal(found, expected)
    assert torch.equal(network.heads[0].get_parameter("weight"), kept)


def test_a_readout_has_no_tensor_in_a_shard() -> None:
    network = grown([2, 1], geometry=READ)
    assert not [name for name in network.state_dict() if "readout" in name or "shares" in name]
    assert network.spec.doubt_width == network.spec.narrow_width


def test_a_manifest_names_the_readout_and_leaves_a_narrow_one_out() -> None:
    wide = geometry_of(READ)
    assert wide.model_dump()["readout"] == {"blocks": (1, 3), "grid_block": 3, "grid": 3}
    assert spec_of(wide, tasks=()) == READ
    assert "readout" not in geometry_of(replace(READ, readout=None)).model_dump()


@pytest.mark.parametrize(
    ("readout", "reason"),
    [
        ({"blocks": ()}, "rising order"),
        ({"blocks": (2, 1)}, "rising order"),
        ({"blocks": (1, 1)}, "rising order"),
        ({"blocks": (0, 1)}, "between 1 and"),
        ({"blocks": (1,), "grid": 17, "grid_block": 1}, "between 0 and 16"),
        ({"blocks": (1,), "grid": 2}, "both grid and grid_block"),
        ({"blocks": (1,), "grid": 2, "grid_block": 2}, "not one of the readout's blocks"),
    ],
)
def test_a_readout_that_makes_no_sense_is_refused(readout: dict[str, object], reason: str) -> None:
    with pytest.raises(SpecInvalid, match=reason):
        Readout(**readout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("geometry", "reason"),
    [
        ({"readout": Readout(blocks=(4,))}, "does not go with a depth of 4"),
        ({"readout": Readout(blocks=(1,), grid_block=1, grid=5)}, "more cells a side"),
    ],
)
def test_a_readout_that_does_not_fit_the_network_is_refused(
    geometry: dict[str, Readout], reason: str
) -> None:
    with pytest.raises(SpecInvalid, match=reason):
        replace(READ, **geometry)  # type: ignore[arg-type]


def test_a_network_from_scratch_has_no_readout() -> None:
    plain: NetworkSpec = replace(GEOMETRY, depth=3)
    with pytest.raises(SpecInvalid, match="only a pre-trained first expert"):
        replace(plain, readout=Readout(blocks=(1,)))
