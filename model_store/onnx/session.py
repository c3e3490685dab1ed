"""Inference sessions of onnxruntime that use weights where they lie.

Sessions of several versions that are given the same arrays hold them once: the runtime reads
them in the memory of the arrays, and packs no copies of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
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
    """A version that runs on the CPU, in one process."""

    def __init__(
        self, weights: Weights, *, threads: int | None, places: Sequence[int] | None = None
    ) -> None:
        """`threads`: None for as many as there are cores. The arrays must not change any more."""
        import onnxruntime  # type: ignore[import-untyped]

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        options.log_severity_level = 3
        # What is packed is a copy, one for each session.
        options.add_session_config_entry("session.disable_prepacking", "1")
        model = onnx_model(
            weights, files=in_memory(weights, name="weights"), metadata={}, places=places
        )
        self._arrays = weights.named()
        self._values = _share(options, model, self._arrays)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "graph.onnx")
            path.write_bytes(model.SerializeToString())
            # The runtime wants a file to be there, and reads nothing that it was given already.
            Path(folder, "weights").touch()
            self._session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )

    def __call__(self, images: Floats) -> Floats:
        logits: Floats = self._session.run(["logits"], {"images": images})[0]
        return logits


def _share(options: Any, model: onnx.ModelProto, arrays: Arrays) -> list[Any]:
    """Gives the runtime the memory of all weights but for the small ones that the graph stacks:
    it does that once, when a session begins, and needs them in the model."""
    import onnxruntime

    stacked = {name for node in model.graph.node if node.op_type in STACKING for name in node.input}
    inline(model, {name: array for name, array in arrays.items() if name in stacked})
    values = []
    for name, array in arrays.items():
        if name not in stacked:
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            options.add_initializer(name, value)
            values.append(value)
    return values
