"""A GPU that is none: records passes and replays them as CUDA would, on the memory they were
recorded on. It keeps nothing alive that a pass did not allocate, and tells when that was freed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from model_store.preprocess import Pixels


class FreedMemory(Exception):
    """A graph was replayed that reads memory which was given up. CUDA would not have said so."""


@dataclass(frozen=True, slots=True, eq=False)
class Address:
    """A tensor as a kernel knows it."""

    memory: StorageWeakRef
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Address:
        return cls(
            StorageWeakRef(tensor.untyped_storage()),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            raise FreedMemory(f"{self.shape} of {self.dtype}")
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    call: Callable[..., Any]
    args: Any
    kwargs: Any
    fresh: dict[int, Address]
    """Of its results those that it allocates."""

    def run(self) -> None:
        args, kwargs = tree_map(_to_tensor, (self.args, self.kwargs))
        results = tree_leaves(self.call(*args, **kwargs))
        for place, address in self.fresh.items():
            address.tensor().copy_(results[place])


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.own: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {
            one.untyped_storage()._cdata
            for one in tree_leaves((args, kwargs))
            if isinstance(one, Tensor)
        }
        where, named = tree_map(_to_address, (args, kwargs))
        results = func(*args, **kwargs)
        fresh = {
            place: Address.of(one)
            for place, one in enumerate(tree_leaves(results))
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in given
        }
        leaves = tree_leaves(results)
        self.own += [leaves[place].untyped_storage() for place in fresh]
        self.kernels.append(Kernel(func, where, named, fresh))
        return results


@dataclass(slots=True, eq=False, weakref_slot=True)
class FakeGraph:
    images: int
    kernels: list[Kernel]
    own: list[torch.UntypedStorage]
    found: Tensor
    told: Callable[[int], None]

    def replay(self) -> Tensor:
        with torch.inference_mode():
            for kernel in self.kernels:
                kernel.run()
        self.told(self.images)
        return self.found

    @property
    def points_into_freed_memory(self) -> bool:
        leaves = tree_leaves([(one.args, one.kwargs) for one in self.kernels])
        return any(one.memory.expired() for one in leaves if isinstance(one, Address))


@dataclass(slots=True)
class FakeDriver:
    place: torch.device = field(default_factory=lambda: torch.device("cpu"))
    captured: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    """The images of each graph that was recorded, and replayed."""
    graphs: WeakSet[FakeGraph] = field(default_factory=WeakSet)
    full: bool = False

    def copy_in(self, pixels: Pixels, *, into: Tensor) -> None:
        assert pixels.dtype == np.uint8
        into.copy_(torch.from_numpy(pixels))

    def copy_out(self, found: Tensor) -> Any:
        return found.clone().numpy()

    def capture(self, run: Callable[[], Tensor]) -> FakeGraph:
        if self.full:
            raise RuntimeError("no memory left")
        with Recorder() as recorder:
            found = run()
        self.captured.append(len(found))
        graph = FakeGraph(len(found), recorder.kernels, recorder.own, found, self.replayed.append)
        self.graphs.add(graph)
        return graph


def _to_address(value: Any) -> Any:
    return Address.of(value) if isinstance(value, Tensor) else value


def _to_tensor(value: Any) -> Any:
    return value.tensor() if isinstance(value, Address) else value
