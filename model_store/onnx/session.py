"""Run ONNX graphs in onnxruntime, with weights that sessions share.

The runtime reads weights in the memory of the given arrays, without copies unless told to pack.
All sessions take the memory of a pass from one arena.
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
READ_AT_START = ("Unsqueeze", "Concat", "Reshape", "Conv")
"""The nodes whose weights the runtime reads while a session starts."""


class Session:
    """The graph of a version or a lineage, ready to run in this process."""

    def __init__(
        self, weights: Weights, *, threads: int | None, device: str = "cpu", pack: bool = False
    ) -> None:
        """Open a session over arrays that must not change after.

        `threads` is the number of cores if None. `pack` copies most weights in an order that suits
        products: about a tenth faster, but not shared with other sessions.
        """
        self._output = weights.output
        self._alone = weights.alone
        self._arrays = weights.named()
        model = onnx_model(
            weights, files=in_memory(weights, name="weights"), metadata={}, fused=True
        )
        options = _options(threads)
        if device == "cpu":
            self._values = _share(options, model, self._arrays)
            self._session = _on_cpu(model, options, pack=pack)
        else:
            self._session = _on_gpu(model, options, self._arrays)

    def __call__(self, images: Floats) -> Floats:
        """Compute logits [N, classes], or the token [N, channels of all experts]."""
        if self._alone and len(images) > 1:
            return np.concatenate([self._run(images[row : row + 1]) for row in range(len(images))])
        return self._run(images)

    def _run(self, images: Floats) -> Floats:
        given: Floats = self._session.run([self._output], {"images": images})[0]
        return given


def _options(threads: int | None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    # Threads of a pass would go on looking for work for milliseconds after it, which decoding and
    # the other sessions need (docs/adr/115).
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _on_cpu(model: onnx.ModelProto, options: Any, *, pack: bool) -> Any:
    import onnxruntime

    # Planning the reuse of memory takes most of the start of a session: its time is quadratic in
    # the nodes. The arena reuses memory without a plan.
    options.enable_mem_reuse = False
    options.enable_mem_pattern = False  # it would keep memory for every batch size
    options.add_session_config_entry("session.disable_prepacking", "0" if pack else "1")
    _one_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "graph.onnx")
        path.write_bytes(model.SerializeToString())
        # The runtime requires the file, but reads no weight that it was given in memory.
        Path(folder, "weights").touch()
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _on_gpu(model: onnx.ModelProto, options: Any, arrays: Arrays) -> Any:
    """Open a session on a GPU. Each session copies its weights to the device."""
    import onnxruntime

    inline(model, arrays)
    return onnxruntime.InferenceSession(
        model.SerializeToString(),
        options,
        providers=["CUDAExecutionProvider", "CPUExecutionProvider"],
    )


@cache
def _one_arena() -> None:
    """Register one arena for the passes of all sessions of this process."""
    import onnxruntime

    place = onnxruntime.OrtMemoryInfo(
        "Cpu",
        onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR,
        0,
        onnxruntime.OrtMemType.DEFAULT,
    )
    onnxruntime.create_and_register_allocator(place, None)


def _share(options: Any, model: onnx.ModelProto, arrays: Arrays) -> list[Any]:
    """Give the runtime the memory of the weights, and put a few weights into the model itself.

    The runtime reads those while the session starts: weights that the graph stacks, those of
    convolutions, and single numbers such as the bias of a lone class, which its optimiser tries to
    fold.
    """
    import onnxruntime

    read = {
        name for node in model.graph.node if node.op_type in READ_AT_START for name in node.input
    }
    read |= {name for name, array in arrays.items() if array.size == 1}
    inline(model, {name: array for name, array in arrays.items() if name in read})
    values = []
    for name, array in arrays.items():
        if name not in read:
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            options.add_initializer(name, value)
            values.append(value)
    return values
