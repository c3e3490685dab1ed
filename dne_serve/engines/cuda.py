"""A CUDA device by torch. All that is said to CUDA is said here.

Has not been run: see docs/adr/027-the-device-seam.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from dne_serve.engines.device import Floats
from dne_serve.engines.gpu import Graph
from model_store.preprocess import Pixels


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CudaGraph:
    graph: torch.cuda.CUDAGraph
    found: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.found


class Cuda:
    def __init__(self, place: torch.device) -> None:
        self.place = place
        self._copying = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
        # Always the same: libraries keep memory for every stream that they have met.
        self._capturing = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
        self._graphs: WeakSet[CudaGraph] = WeakSet()

    def copy_in(self, pixels: Pixels, *, into: Tensor) -> None:
        # From torch's store of pinned buffers, which gives none out before it was copied from.
        staged = torch.from_numpy(pixels).pin_memory()
        computing = torch.cuda.current_stream(self.place)
        self._copying.wait_stream(computing)  # the pass before may still read from there
        with torch.cuda.stream(self._copying):
            into.copy_(staged, non_blocking=True)
        computing.wait_stream(self._copying)

    def copy_out(self, found: Tensor) -> Floats:
        staged = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        staged.copy_(found, non_blocking=True)
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        there.record(torch.cuda.current_stream(self.place))
        there.synchronize()
        answers: Floats = staged.numpy()
        return answers

    def capture(self, run: Callable[[], Tensor]) -> Graph:
        computing = torch.cuda.current_stream(self.place)
        self._capturing.wait_stream(computing)
        with torch.cuda.stream(self._capturing):
            run()  # what libraries set up once must not be part of the recording
        computing.wait_stream(self._capturing)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph,
            pool=self._pool(),
            stream=self._capturing,
            capture_error_mode="thread_local",  # other threads may use CUDA meanwhile
        ):
            found = run()
        captured = CudaGraph(graph, found)
        self._graphs.add(captured)
        return captured

    def _pool(self) -> Any:
        """The memory of the other graphs: there is one pass at a time, and its token is read
        before the next. That of a graph which lives, as torch refuses a pool that nobody uses."""
        other = next(iter(self._graphs), None)
        return None if other is None else other.graph.pool()
