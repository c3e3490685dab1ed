"""Collect the nodes and constants of an ONNX graph, and name their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]


class Writer:
    """The nodes of a graph, its small constants, and the names and files of its weights."""

    def __init__(self, *, fused: bool = False) -> None:
        """`fused`: operators of onnxruntime may be used beside the standard ones."""
        self.fused = fused
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._declared: set[str] = set()
        self._once: dict[tuple[str, str], list[str]] = {}

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def ops(self, kind: str, *inputs: str, count: int, **attributes: Any) -> list[str]:
        """Add a node with several outputs."""
        names = [f"{kind}_{len(self.nodes)}_{part}" for part in range(count)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names

    def once(self, kind: str, value: str, make: Callable[[], list[str]]) -> list[str]:
        """Add the nodes that make this of a value, or find them."""
        if (kind, value) not in self._once:
            self._once[kind, value] = make()
        return self._once[kind, value]

    def declare(self, name: str, array: Array, *, location: str, offset: int) -> None:
        """Declare a weight: its type and shape, and the file and offset of its bytes."""
        tensor = TensorProto(
            name=name,
            dims=array.shape,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            data_location=TensorProto.EXTERNAL,
        )
        place = {"location": location, "offset": str(offset), "length": str(array.nbytes)}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=value)
        self.initializers.append(tensor)
        self._declared.add(name)

    def has(self, name: str) -> bool:
        """Return whether a weight of this name was declared."""
        return name in self._declared

    def constant(self, array: NDArray[np.float32] | NDArray[np.int64] | NDArray[np.uint8]) -> str:
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self.initializers.append(numpy_helper.from_array(array, name))
            self._constants[key] = name
        return self._constants[key]

    def integers(self, *values: int) -> str:
        return self.constant(np.asarray(values, dtype=np.int64))

    def number(self, value: float) -> str:
        return self.constant(np.asarray([value], dtype=np.float32))

    def reshape(self, value: str, *shape: int) -> str:
        return self.op("Reshape", value, self.integers(*shape))

    def transpose(self, value: str, *order: int) -> str:
        return self.op("Transpose", value, perm=list(order))

    def split(self, value: str, *, parts: int, axis: int) -> list[str]:
        return self.ops("Split", value, count=parts, axis=axis, num_outputs=parts)

    def first(self, value: str, *, end: int, axis: int) -> str:
        """Keep the places before `end` on an axis."""
        bounds = (self.integers(one) for one in (0, end, axis))
        return self.op("Slice", value, *bounds)

    def stack(self, values: Sequence[str]) -> str:
        """Stack values of equal shape along a new first axis."""
        return self.join([self.op("Unsqueeze", v, self.integers(0)) for v in values], axis=0)

    def join(self, values: Sequence[str], *, axis: int) -> str:
        return values[0] if len(values) == 1 else self.op("Concat", *values, axis=axis)

    def normalised(self, value: str, *, width: int, eps: float) -> str:
        """Apply a LayerNorm without scale and bias."""
        ones = self.constant(np.ones(width, dtype=np.float32))
        return self.op("LayerNormalization", value, ones, axis=-1, epsilon=eps)
