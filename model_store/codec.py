"""Encode networks and images as shards, and decode them. A shard holds one prefix of names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor, nn

from model_store.inference.doubt import Doubt
from model_store.network.expert import Expert
from model_store.network.network import Network
from model_store.records.manifest import Draft, ShardRef
from model_store.store.shard import check_shard, expected_tensors, read_layout

ReadShard = Callable[[ShardRef], bytes]


class ShardWeights(Mapping[str, Tensor]):
    """The tensors of a checked model shard, by their names after `prefix`.

    Each tensor is copied on access, so that few are in memory twice.
    """

    def __init__(
        self, data: bytes, *, prefix: str = "", device: torch.device | str = "cpu"
    ) -> None:
        self._data = data
        self._device = device
        self._layout = {
            name.removeprefix(prefix): stored for name, stored in read_layout(data).items()
        }

    def __getitem__(self, name: str) -> Tensor:
        stored = self._layout[name]
        if stored.start == stored.end:
            return torch.empty(stored.shape, device=self._device)
        copied = bytearray(memoryview(self._data)[stored.start : stored.end])
        tensor = torch.frombuffer(copied, dtype=torch.float32).reshape(stored.shape)
        return tensor.to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)


def encode_expert(network: Network, index: int) -> bytes:
    return _encode(network, prefix=f"experts.{index}.")


def encode_classifier(network: Network) -> bytes:
    return _encode(network, prefix="heads.")


def encode_doubt(tensors: Mapping[str, NDArray[np.float32]]) -> bytes:
    return save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})


def decode_doubt(data: bytes, *, places: Sequence[int]) -> Doubt:
    """Decode a checked doubt shard for the classes at these places."""
    tensors = {name: tensor.numpy() for name, tensor in ShardWeights(data).items()}
    return Doubt.of(tensors, places=places)


def load_doubt(read: ReadShard, manifest: Draft) -> Doubt | None:
    """Load the doubt of a version; None for a version whose score is the largest logit."""
    if manifest.doubt is None:
        return None
    data = read(manifest.doubt)
    check_shard(manifest.doubt, data, expected=expected_tensors(manifest, manifest.doubt))
    return decode_doubt(data, places=manifest.places)


def load_network(
    read: ReadShard, manifest: Draft, *, known: MutableMapping[str, Expert] | None = None
) -> Network:
    """Load the network of `manifest`, frozen, in evaluation mode, on the CPU.

    `known` holds experts by shard digest. They are shared and not read again. New experts are
    added to it, so that the next version costs its delta.
    """
    bank = {} if known is None else known
    for index, ref in enumerate(manifest.experts):
        if ref.sha256 not in bank:
            weights = _read_weights(read, manifest, ref)
            bank[ref.sha256] = _build_expert(manifest, index, weights)
    experts = [bank[ref.sha256] for ref in manifest.experts]
    heads = _build_heads(manifest, _read_weights(read, manifest, manifest.classifier))
    network = Network.assemble(manifest.spec, experts, heads)
    return network.requires_grad_(False).eval()


def _read_weights(read: ReadShard, manifest: Draft, ref: ShardRef) -> dict[str, Tensor]:
    """Read a model shard, check its digest and shapes, and give its tensors by full name."""
    data = read(ref)
    check_shard(ref, data, expected=expected_tensors(manifest, ref))
    return dict(ShardWeights(data))


def encode_images(images: Sequence[bytes]) -> bytes:
    """Pack encoded images (PNG, JPEG …) into one shard, in this order."""
    sizes = [len(image) for image in images]
    return save(
        {
            "bytes": np.frombuffer(b"".join(images), dtype=np.uint8),
            "offsets": np.cumsum([0, *sizes], dtype=np.int64),
        }
    )


def _encode(network: Network, *, prefix: str) -> bytes:
    tensors = {
        name: np.ascontiguousarray(tensor.detach().cpu().numpy())
        for name, tensor in network.state_dict().items()
        if name.startswith(prefix)
    }
    return save(tensors)


def _build_expert(manifest: Draft, index: int, weights: dict[str, Tensor]) -> Expert:
    prefix = f"experts.{index}."
    with torch.device("meta"):  # draw no random numbers for parameters that are replaced
        expert = Expert(manifest.spec, index=index)
    named = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    expert.load_state_dict(named, assign=True)
    expert.freeze()
    return expert


def _build_heads(manifest: Draft, weights: dict[str, Tensor]) -> list[nn.Linear]:
    heads = []
    for index in range(len(manifest.tasks)):
        weight, bias = weights[f"heads.{index}.weight"], weights[f"heads.{index}.bias"]
        head = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
        head.load_state_dict({"weight": weight, "bias": bias}, assign=True)
        heads.append(head)
    return heads
