"""Build an ONNX model from the weights of a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from model_store.inference.doubt import Doubt
from model_store.inference.fold import fold_expert
from model_store.network.network import Network
from model_store.onnx.graph import GraphOf
from model_store.onnx.matmul_nodes import FUSED, passes_alone
from model_store.onnx.weights import Array, Arrays, DataFile, classifier_arrays, expert_arrays
from model_store.onnx.writer import Writer
from model_store.spec import NetworkSpec

OPSET = 20  # the first with Gelu
IR_VERSION = 10  # readable by runtimes since 2024
SAFE, FULL = 63, 127
"""The largest 8-bit weight where two products may be added in 16 bits, and elsewhere."""
OF_FIRST = ("qkv.weight", "out.weight", "widen.weight", "narrow.weight")
OF_LATER = ("widen.value", "narrow.before", "narrow.own")
"""The weights of large products. Stacked weights and classifiers stay in single precision."""


@cache
def largest_here() -> int:
    """Find the largest 8-bit weight by whose products this processor does not overflow.

    onnxruntime adds pairs of products in 16 bits on processors without 8-bit dot products.
    """
    import onnxruntime

    rows, columns, depth = 4, 32, 64
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["rows", "weight"], ["sums"])],
        "sums",
        [helper.make_tensor_value_info("rows", TensorProto.UINT8, [rows, depth])],
        [helper.make_tensor_value_info("sums", TensorProto.INT32, [rows, columns])],
        [numpy_helper.from_array(np.full((depth, columns), FULL, dtype=np.int8), "weight")],
    )
    model = helper.make_model(
        graph, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)]
    )
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (sums,) = session.run(None, {"rows": np.full((rows, depth), 255, dtype=np.uint8)})
    return FULL if bool((sums == 255 * FULL * depth).all()) else SAFE


def quantised(arrays: Arrays, *, is_first: bool, largest: int = SAFE) -> Arrays:
    """Quantise the large arrays of an expert, and add their scales."""
    made: dict[str, Array] = {}
    for name, array in arrays.items():
        if name.endswith(OF_FIRST if is_first else OF_LATER):
            made[name], made[f"{name}.scale"] = quantise(array, largest=largest)
        else:
            made[name] = array
    return made


def quantise(weight: Array, *, largest: int = SAFE) -> tuple[Array, Array]:
    """Quantise [..., I, O] to 8 bits, with a scale for each column: [O]."""
    found = np.abs(weight).max(axis=tuple(range(weight.ndim - 1)))
    scale = np.where(found > 0, found / largest, 1).astype(np.float32)
    return np.rint(weight / scale).astype(np.int8), scale


HEADS, DOUBT = "heads", "doubt"
UNKNOWN_SCORE = "unknown_score"

OnnxPrecision = Literal["fp32", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The arrays of a version by part: `experts.0`, `experts.1` …, `heads` and perhaps `doubt`.

    Without `heads` they are a lineage, whose graph computes the token.
    """

    spec: NetworkSpec
    parts: Mapping[str, Arrays]

    @property
    def output(self) -> Literal["logits", "token"]:
        return "logits" if HEADS in self.parts else "token"

    @property
    def alone(self) -> bool:
        """Whether a pass takes one image."""
        eight_bits = any(array.dtype == np.int8 for array in self.named().values())
        return eight_bits and passes_alone(self.spec)

    def named(self) -> Arrays:
        """Return every array by its name in the graph."""
        return {
            f"{part}.{name}": array
            for part, arrays in self.parts.items()
            for name, array in arrays.items()
        }


def weights_of(
    network: Network, *, precision: OnnxPrecision = "fp32", doubt: Doubt | None = None
) -> Weights:
    """Fold a network into arrays. `doubt`: that of the classes that are answered."""
    spec = network.spec
    parts = {
        f"experts.{index}": arrays_of_expert(
            expert.state_dict(), spec=spec, index=index, precision=precision
        )
        for index, expert in enumerate(network.experts)
    }
    heads = arrays_of_heads(network.heads.state_dict(), spec=spec)
    of_doubt = {} if doubt is None else {DOUBT: doubt.arrays()}
    return Weights(spec=spec, parts={**parts, HEADS: heads, **of_doubt})


def arrays_of_expert(
    state: Mapping[str, Tensor],
    *,
    spec: NetworkSpec,
    index: int,
    precision: OnnxPrecision = "fp32",
    largest: int = SAFE,
) -> Arrays:
    """Fold an expert into arrays. They depend on no younger expert, so versions share them.

    `largest`: the largest weight in 8 bits.
    """
    run = spec.run_of(index)
    with torch.inference_mode(False), torch.no_grad():
        folded = fold_expert(state, spec=spec, index=index)
        arrays = expert_arrays(folded, before=run.before, token=spec.token)
    if precision == "int8":
        return quantised(arrays, is_first=run.is_first, largest=largest)
    return arrays


def arrays_of_heads(state: Mapping[str, Tensor], *, spec: NetworkSpec) -> Arrays:
    """Join all task heads: `weight` [C, Y] and `bias` [Y]."""
    tasks = range(len(spec.tasks))
    with torch.no_grad():
        return classifier_arrays(
            torch.cat([state[f"{task}.weight"] for task in tasks]),
            torch.cat([state[f"{task}.bias"] for task in tasks]),
        )


def onnx_model(
    weights: Weights,
    *,
    files: Mapping[str, DataFile],
    metadata: Mapping[str, str],
    places: Sequence[int] | None = None,
    fused: bool = False,
) -> onnx.ModelProto:
    """Build the graph, with every weight in the file of its part. `fused`: for onnxruntime alone.

    With `places` the graph gives only those logits, in that order. With a doubt, which is that of
    those classes, it has a second output: the probability of none of them.
    """
    writer = Writer(fused=fused)
    for part, arrays in weights.parts.items():
        for name, array in arrays.items():
            file = files[part]
            writer.declare(f"{part}.{name}", array, location=file.name, offset=file.offsets[name])
    spec, nodes = weights.spec, GraphOf(writer, weights.spec)
    token, width = nodes.token(), spec.token_width
    given = token
    if weights.output == "logits":
        given, width = nodes.logits(token), len(spec.classes)
        if places is not None and len(places) < width:
            given, width = writer.op("Gather", given, writer.integers(*places), axis=1), len(places)
    writer.nodes.append(helper.make_node("Identity", [given], [weights.output]))
    outputs = [helper.make_tensor_value_info(weights.output, TensorProto.FLOAT, ["batch", width])]
    if DOUBT in weights.parts:
        score = nodes.unknown_score(token)
        writer.nodes.append(helper.make_node("Identity", [score], [UNKNOWN_SCORE]))
        outputs.append(helper.make_tensor_value_info(UNKNOWN_SCORE, TensorProto.FLOAT, ["batch"]))
    size = spec.image_size
    graph = helper.make_graph(
        writer.nodes,
        "dne",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, size, size])],
        outputs,
        writer.initializers,
    )
    others = [helper.make_opsetid(FUSED, 1)] if fused else []
    model = helper.make_model(
        graph,
        producer_name="dne-serve",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET), *others],
    )
    helper.set_model_props(model, dict(metadata))
    return model


def in_memory(weights: Weights, *, name: str = "") -> dict[str, DataFile]:
    """Describe files without bytes, for a model whose weights are given in memory."""
    return {
        part: DataFile(name=name, data=b"", offsets=dict.fromkeys(arrays, 0))
        for part, arrays in weights.parts.items()
    }


def inline(model: onnx.ModelProto, arrays: Arrays) -> None:
    """Put these weights into the model itself."""
    for tensor in model.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name], tensor.name))
