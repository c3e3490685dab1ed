"""Inference sessions of onnxruntime that use weights where they lie.

Sessions of several versions that are given the same arrays hold them once: the runtime reads
them in the memory of the arrays, and packs no copies of its own unless told to. What a pass needs
besides is memory that all sessions use in turn.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from model_store.onnx.model import Weights, in_memory, inline, onnx_model
from model_store.onnx.weights import Arrays

Floats = NDArray[np.float32]
STACKING = ("Unsqueeze", "Concat", "Reshape")


class Session:
    """A version, or a lineage, that runs in this process."""

    def __init__(
        self, weights: Weights, *, threads: int | None, device: str = "cpu", pack: bool = False
    ) -> None:
        """`threads`: None for as many as there are cores. `pack`: the session makes a copy of its
        own of most weights, in an order that suits products: a tenth faster, and shared with
        nobody. The arrays must not change any more."""
        self._output = weights.output
        self._arrays = weights.named()
        model = onnx_model(weights, files=in_memory(weights, name="weights"), metadata={})
        options = _options(threads)
        if device == "cpu":
            self._values = _share(options, model, self._arrays)
            self._session = _on_cpu(model, options, pack=pack)
        else:
            self._session = _on_gpu(model, options, self._arrays)

    def __call__(self, images: Floats) -> Floats:
        """Logits [N, classes], or the token [N, channels of all experts]."""
        given: Floats = self._session.run([self._output], {"images": images})[0]
        return given


def _options(threads: int | None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    return options


def _on_cpu(model: onnx.ModelProto, options: Any, *, pack: bool) -> Any:
    import onnxruntime

    # Planning which values share their memory takes most of the time that a session needs to
    # begin, quadratic in the nodes; memory that goes back to an arena is used again without.
    options.enable_mem_reuse = False
    options.enable_mem_pattern = False  # would keep a block for every batch size
    options.add_session_config_entry("session.disable_prepacking", "0" if pack else "1")
    _one_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "graph.onnx")
        path.write_bytes(model.SerializeToString())
        # The runtime wants a file to be there, and reads nothing that it was given already.
        Path(folder, "weights").touch()
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _on_gpu(model: onnx.ModelProto, options: Any, arrays: Arrays) -> Any:
    """Weights are copied to the device whatever is done here: each session has its own."""
    import onnxruntime

    inline(model, arrays)
    return onnxruntime.InferenceSession(
        model.SerializeToString(),
        options,
        providers=["CUDAExecutionProvider", "CPUExecutionProvider"],
    )


@cache
def _one_arena() -> None:
    """Memory for the values of a pass, for all sessions of this process that ask for it."""
    import onnxruntime

    place = onnxruntime.OrtMemoryInfo(
        "Cpu",
        onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR,
        0,
        onnxruntime.OrtMemType.DEFAULT,
    )
    onnxruntime.create_and_register_allocator(place, None)


def _share(options: Any, model: onnx.ModelProto, arrays: Arrays) -> list[Any]:
    """Gives the runtime the memory of all weights but for the few that it reads while a session
    begins, which have to be in the model: what the graph stacks, and single numbers (the bias of
    a lone class), which its optimiser tries to fold."""
    import onnxruntime

    read = {name for node in model.graph.node if node.op_type in STACKING for name in node.input}
    read |= {name for name, array in arrays.items() if array.size == 1}
    inline(model, {name: array for name, array in arrays.items() if name in read})
    values = []
    for name, array in arrays.items():
        if name not in read:
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            options.add_initializer(name, value)
            values.append(value)
    return values
