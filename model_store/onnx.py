"""A version as one ONNX file. The graph is written from the weights, not traced.

Input `images`: float32 [batch, 3, S, S], normalised. Output `logits`: float32 [batch, classes].
The file's metadata carries version, manifest digest, classes and preprocessing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from model_store.codec import load_network
from model_store.errors import WriteFailed
from model_store.manifest import Manifest
from model_store.network import Expert, Network
from model_store.network.expert import Block
from model_store.network.layers import SpatialAttention, TaskAttention
from model_store.store import Store

OPSET = 20  # the first with Gelu
IR_VERSION = 10  # what runtimes of the last years read


def export_onnx(store: Store, version: int, *, out: Path) -> Path:
    """Writes `out/version-NNNNNNNN.onnx` in one step: the file is whole or it is not there."""
    manifest = store.manifest(version)
    network = load_network(store.read_shard, manifest)
    model = network_to_onnx(network, metadata=_metadata(manifest), places=manifest.places)
    path = out / f"version-{version:08d}.onnx"
    try:
        out.mkdir(parents=True, exist_ok=True)
        _replace(path, model.SerializeToString())
    except OSError as error:
        raise WriteFailed(f"cannot write {path}: {error.strerror}") from error
    return path


def network_to_onnx(
    network: Network, *, metadata: dict[str, str], places: Sequence[int] | None = None
) -> onnx.ModelProto:
    """The graph of `network`. With `places` only those logits are given, in that order."""
    writer = _Writer()
    logits = _network(writer, network)
    if places is not None and len(places) < len(network.spec.classes):
        logits = writer.op("Gather", logits, writer.integers(*places), axis=1)
    writer.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
    size, classes = network.spec.image_size, len(places or network.spec.classes)
    graph = helper.make_graph(
        writer.nodes,
        "dne",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, size, size])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes])],
        writer.initializers,
    )
    model = helper.make_model(
        graph,
        producer_name="dne-serve",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    helper.set_model_props(model, metadata)
    onnx.checker.check_model(model)
    return model


class _Writer:
    """Collects nodes and constants, and names what they give."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def split(self, value: str, *, parts: int, axis: int) -> list[str]:
        names = [f"Split_{len(self.nodes)}_{part}" for part in range(parts)]
        self.nodes.append(helper.make_node("Split", [value], names, axis=axis, num_outputs=parts))
        return names

    def weight(self, tensor: Tensor) -> str:
        return self.constant(tensor.detach().cpu().numpy())

    def constant(self, array: NDArray[np.float32] | NDArray[np.int64]) -> str:
        name = f"constant_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def integers(self, *values: int) -> str:
        return self.constant(np.asarray(values, dtype=np.int64))

    def reshape(self, value: str, *shape: int) -> str:
        """0 keeps a dimension, as the batch's."""
        return self.op("Reshape", value, self.integers(*shape))

    def linear(self, value: str, layer: nn.Linear) -> str:
        product = self.op("MatMul", value, self.weight(layer.weight.T))
        if layer.bias is None:
            return product
        return self.op("Add", product, self.weight(layer.bias))

    def layer_norm(self, value: str, layer: nn.LayerNorm) -> str:
        scale, bias = self.weight(layer.weight), self.weight(layer.bias)
        return self.op("LayerNormalization", value, scale, bias, axis=-1, epsilon=layer.eps)


def _network(writer: _Writer, network: Network) -> str:
    spec = network.spec
    experts = [expert for expert in network.experts if isinstance(expert, Expert)]
    states = [_embed(writer, expert) for expert in experts]
    in_sequence = spec.token == "in-sequence"
    for layer in range(spec.depth - in_sequence):
        blocks = [expert.patch_block(layer) for expert in experts]
        states = _run_blocks(writer, blocks, states, reads=spec.positions, writes=spec.positions)
    if not in_sequence:
        states = [_with_token(writer, expert, x) for expert, x in zip(experts, states, strict=True)]
    blocks = [expert.last_block for expert in experts]
    tokens = _run_blocks(writer, blocks, states, reads=spec.patches + 1, writes=1)
    slices = [
        writer.layer_norm(token, expert.norm) for expert, token in zip(experts, tokens, strict=True)
    ]
    token = writer.op("Concat", *slices, axis=-1)
    flat = writer.reshape(token, 0, spec.token_width)
    return writer.linear(flat, _joined_heads(network))


def _embed(writer: _Writer, expert: Expert) -> str:
    convolution = expert.patch_embed
    assert convolution.bias is not None
    grid = writer.op(
        "Conv",
        "images",
        writer.weight(convolution.weight),
        writer.weight(convolution.bias),
        strides=list(convolution.stride),
    )
    rows = writer.reshape(grid, 0, convolution.out_channels, -1)
    patches = writer.op("Transpose", rows, perm=[0, 2, 1])
    state = _with_token(writer, expert, patches) if expert.token_in_sequence else patches
    return writer.op("Add", state, writer.weight(expert.position))


def _with_token(writer: _Writer, expert: Expert, patches: str) -> str:
    batch = writer.op("Shape", "images", start=0, end=1)
    shape = writer.op("Concat", batch, writer.integers(1, expert.token.numel()), axis=0)
    token = writer.op("Expand", writer.weight(expert.token), shape)
    return writer.op("Concat", token, patches, axis=1)


def _run_blocks(
    writer: _Writer, blocks: Sequence[Block], states: Sequence[str], *, reads: int, writes: int
) -> list[str]:
    """One block of every expert: the first `writes` positions, which read all `reads`."""
    attended = [
        _attend(writer, block, x, reads=reads, writes=writes)
        for block, x in zip(blocks, states, strict=True)
    ]
    return _mix_all(writer, blocks, attended, positions=writes)


def _attend(writer: _Writer, block: Block, x: str, *, reads: int, writes: int) -> str:
    normed = writer.layer_norm(x, block.norm1)
    read = _spatial(writer, block.attention, normed, positions=reads, queries=writes)
    if writes < reads:
        x = writer.op("Slice", x, *(writer.integers(value) for value in (0, writes, 1)))
    return writer.op("Add", x, read)


def _spatial(
    writer: _Writer, layer: SpatialAttention, x: str, *, positions: int, queries: int
) -> str:
    width = layer.out.in_features
    head_width = width // layer.heads
    parts = writer.reshape(writer.linear(x, layer.qkv), 0, positions, 3, layer.heads, head_width)
    by_part = writer.op("Transpose", parts, perm=[2, 0, 3, 1, 4])
    q, k, v = (
        writer.op("Squeeze", part, writer.integers(0))
        for part in writer.split(by_part, parts=3, axis=0)
    )
    if queries < positions:
        q = writer.op("Slice", q, *(writer.integers(value) for value in (0, queries, 2)))
    scale = writer.constant(np.asarray(head_width**-0.5, dtype=np.float32))
    scores = writer.op("MatMul", q, writer.op("Transpose", k, perm=[0, 1, 3, 2]))
    attention = writer.op("Softmax", writer.op("Mul", scores, scale), axis=-1)
    mixed = writer.op("Transpose", writer.op("MatMul", attention, v), perm=[0, 2, 1, 3])
    return writer.linear(writer.reshape(mixed, 0, queries, width), layer.out)


def _mix_all(
    writer: _Writer, blocks: Sequence[Block], attended: Sequence[str], *, positions: int
) -> list[str]:
    normed: list[str] = []
    hidden: list[str] = []
    out: list[str] = []
    for block, s in zip(blocks, attended, strict=True):
        normed.append(writer.layer_norm(s, block.norm2))
        hidden.append(writer.op("Gelu", _read(writer, block.widen, normed, positions=positions)))
        narrowed = _read(writer, block.narrow, hidden, positions=positions)
        out.append(writer.op("Add", s, narrowed))
    return out


def _read(
    writer: _Writer, layer: nn.Linear | TaskAttention, sources: Sequence[str], *, positions: int
) -> str:
    if isinstance(layer, nn.Linear):
        return writer.linear(sources[-1], layer)
    count, reads, writes = layer.value.shape
    joined = writer.op("Concat", *sources, axis=-1)
    n = writer.reshape(joined, 0, positions, count, reads)
    attention = _task_attention(writer, layer, n)
    scaled = writer.op(
        "Mul",
        writer.op("Unsqueeze", attention, writer.integers(4)),
        writer.op("Unsqueeze", n, writer.integers(2)),
    )
    flat = writer.reshape(scaled, 0, positions, layer.heads, count * reads)
    written = writer.op("MatMul", flat, writer.weight(layer.value.flatten(0, 1)))
    bias = writer.op("MatMul", attention, writer.weight(layer.value_bias))
    return writer.reshape(writer.op("Add", written, bias), 0, positions, layer.heads * writes)


def _task_attention(writer: _Writer, layer: TaskAttention, n: str) -> str:
    count = layer.value.shape[0]
    own = writer.op("Slice", n, *(writer.integers(v) for v in (count - layer.heads, count, 2)))
    folded = layer.query.double().T @ layer.key.double() * layer.reads**-0.5
    asked = writer.op("MatMul", own, writer.weight(folded.float()))
    scores = writer.op("MatMul", asked, writer.op("Transpose", n, perm=[0, 1, 3, 2]))
    attention = writer.op("Softmax", scores, axis=-1)
    return writer.op("Mul", attention, writer.weight(layer.scale[:, None]))


def _joined_heads(network: Network) -> nn.Linear:
    heads = [head for head in network.heads if isinstance(head, nn.Linear)]
    joined = nn.Linear(network.spec.token_width, len(network.spec.classes), device="meta")
    weight, bias = torch.cat([head.weight for head in heads]), torch.cat([h.bias for h in heads])
    joined.load_state_dict({"weight": weight, "bias": bias}, assign=True)
    return joined


def _metadata(manifest: Manifest) -> dict[str, str]:
    return {
        "version": str(manifest.version),
        "digest": manifest.digest,
        "classes": json.dumps(manifest.classes, ensure_ascii=False),
        "preprocessing": manifest.preprocessing.model_dump_json(),
        "temperature": repr(manifest.calibration.temperature),
    }


def _replace(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(data)
            file.flush()
            os.chmod(temporary, 0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
