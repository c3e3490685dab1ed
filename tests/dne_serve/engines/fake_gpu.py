"""A GPU that is none: records passes and replays them as CUDA would, on the memory they were
recorded on. It keeps nothing alive that a pass did not allocate, and tells when that was freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

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
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: dict[int, Address]
    """Of its results those that it allocates."""

    def run(self) -> None:
        args, kwargs = _mapped(_to_tensor, self.args), _named(_to_tensor, self.kwargs)
        results = list(_leaves(self.call(*args, **kwargs)))
        for place, address in self.fresh.items():
            address.tensor().copy_(results[place])

    @property
    def addresses(self) -> Iterator[Address]:
        """All that it reads or writes and does not allocate."""
        given = _leaves((*self.args, *self.kwargs.values()))
        return (one for one in given if isinstance(one, Address))


class Recorder(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. Skipping the compiler would load it, which takes seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.own: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {
            one.untyped_storage()._cdata
            for one in _leaves((*args, *kwargs.values()))
            if isinstance(one, Tensor)
        }
        where, named = _mapped(_to_address, args), _named(_to_address, kwargs)
        results = func(*args, **kwargs)
        leaves = list(_leaves(results))
        fresh = {
            place: Address.of(one)
            for place, one in enumerate(leaves)
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in given
        }
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
        return any(one.memory.expired() for kernel in self.kernels for one in kernel.addresses)


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


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """As torch's own `tree_map`, which takes most of the time of a pass: kernels take lists and
    tuples of tensors, and nothing deeper."""
    if isinstance(value, list | tuple):
        return type(value)(_mapped(change, one) for one in value)
    return change(value)


def _named(change: Callable[[Any], Any], values: dict[str, Any]) -> dict[str, Any]:
    return {name: _mapped(change, value) for name, value in values.items()}


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _to_address(value: Any) -> Any:
    return Address.of(value) if isinstance(value, Tensor) else value


def _to_tensor(value: Any) -> Any:
    return value.tensor() if isinstance(value, Address) else value
