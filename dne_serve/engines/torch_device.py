"""Define a device: copy images in, run a pass over them, copy the answers out.

One thread uses a device, as one thread uses the torch engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.inference.forward import Lineage
from model_store.inference.workspace import Scratch
from model_store.preprocess import Normalisation, Pixels, normalise
from model_store.records.manifest import Preprocessing

Floats = NDArray[np.float32]


class Passes(Protocol):
    """The passes of one version on a device."""

    def __call__(self, pixels: Pixels) -> Tensor:
        """Compute the token [N, channels of all experts] of images [N, S, S, 3], on the device.
        The token is valid until the next pass of any version."""

    def prepare(self) -> Iterator[None]:
        """Prepare, in steps, so that the first batch is as fast as the next."""

    def renew(self) -> Iterator[None]:
        """Prepare again, in steps, if the memory of the experts has moved."""


class Device(Protocol):
    place: torch.device

    def passes(self, lineage: Lineage, *, preprocessing: Preprocessing) -> Passes: ...

    def fetch(self, found: Tensor) -> Floats:
        """Wait for a result and copy it to ordinary memory."""


class Cpu:
    """The processor: images need no copying, and a pass is a call."""

    def __init__(self, *, max_batch: int) -> None:
        self.place = torch.device("cpu")
        self._max_batch = max_batch

    def passes(self, lineage: Lineage, *, preprocessing: Preprocessing) -> Passes:
        return CpuPasses(lineage, preprocessing=preprocessing, max_batch=self._max_batch)

    def fetch(self, found: Tensor) -> Floats:
        answers: Floats = found.numpy()
        return answers


@dataclass(frozen=True, slots=True)
class CpuPasses:
    lineage: Lineage
    preprocessing: Preprocessing
    max_batch: int

    def __call__(self, pixels: Pixels) -> Tensor:
        return self.lineage.token(torch.from_numpy(normalise(pixels, self.preprocessing)))

    def prepare(self) -> Iterator[None]:
        self.lineage.reserve(self.max_batch)
        yield

    def renew(self) -> Iterator[None]:
        """Do nothing: a call finds the memory at any place."""
        return iter(())


log = logging.getLogger("dne_serve")


class Graph(Protocol):
    """A recorded pass."""

    def replay(self) -> Tensor:
        """Run the pass on the contents of its inputs. The result is always the same tensor."""


class Driver(Protocol):
    """The operations of a GPU, done in the order of the calls."""

    place: torch.device

    def copy_in(self, pixels: Pixels, *, into: Tensor) -> None: ...

    def copy_out(self, found: Tensor) -> Floats:
        """Copy a result out, and wait for it."""

    def capture(self, run: Callable[[], Tensor]) -> Graph:
        """Record the work of `run`; RuntimeError if it cannot be recorded. Keep nothing alive but
        the memory that `run` itself allocates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    graph: Graph
    relocations: tuple[int, ...]
    """Relocations of the lineage's memory when the graph was recorded."""


class Gpu:
    def __init__(self, driver: Driver, *, max_batch: int) -> None:
        self.place = driver.place
        self._driver = driver
        self._sizes = graph_sizes(max_batch)
        self._intakes: dict[int, Tensor] = {}

    def passes(self, lineage: Lineage, *, preprocessing: Preprocessing) -> Passes:
        return GraphedPasses(
            lineage,
            normalising=Normalising(preprocessing, place=self.place),
            intake_NHWC=self._intake(preprocessing.image_size),
            sizes=self._sizes,
            driver=self._driver,
        )

    def fetch(self, found: Tensor) -> Floats:
        return self._driver.copy_out(found)

    def _intake(self, size: int) -> Tensor:
        """Find the memory from which graphs read images of this size. All versions share it, as
        there is one pass at a time, and it never moves."""
        if size not in self._intakes:
            shape = (self._sizes[-1], size, size, 3)
            self._intakes[size] = torch.zeros(shape, dtype=torch.uint8, device=self.place)
        return self._intakes[size]


class GraphedPasses:
    """Passes that replay a graph for a batch of a usual size, or of the next larger size, padded
    with old images. Larger batches, and those whose graph is out of date, run kernel by kernel."""

    def __init__(
        self,
        lineage: Lineage,
        *,
        normalising: Normalising,
        intake_NHWC: Tensor,
        sizes: tuple[int, ...],
        driver: Driver,
    ) -> None:
        self._lineage = lineage
        self._normalising = normalising
        self._intake_NHWC = intake_NHWC
        self._sizes = sizes
        self._driver = driver
        self._captured: dict[int, Captured] = {}

    def __call__(self, pixels: Pixels) -> Tensor:
        count = len(pixels)
        size = next((one for one in self._sizes if one >= count), None)
        if size is None:
            intake_NHWC = torch.empty(pixels.shape, dtype=torch.uint8, device=self._driver.place)
        else:
            intake_NHWC = self._intake_NHWC[:count]
        self._driver.copy_in(pixels, into=intake_NHWC)
        self._forget_outdated()
        captured = None if size is None else self._captured.get(size)
        if captured is None:
            return self._lineage.token(self._normalising(intake_NHWC))
        return captured.graph.replay()[:count]

    def prepare(self) -> Iterator[None]:
        return self.renew()

    def renew(self) -> Iterator[None]:
        for size in reversed(self._sizes):  # a smaller one finds room in what a larger one left
            self._forget_outdated()
            if size not in self._captured:
                self._capture(size)
                yield

    def _capture(self, size: int) -> None:
        intake_NHWC = self._intake_NHWC[:size]

        def run() -> Tensor:
            # Memory of its own, allocated as part of the recording: the lineages' shared one
            # moves whenever a larger version comes.
            return self._lineage.token(self._normalising(intake_NHWC), scratch=Scratch())

        try:
            with torch.inference_mode():
                graph = self._driver.capture(run)
        except RuntimeError as error:  # no memory left, for instance
            log.warning("batches of %d run without a graph: %s", size, error)
        else:
            self._captured[size] = Captured(graph=graph, relocations=self._lineage.relocations)

    def _forget_outdated(self) -> None:
        now = self._lineage.relocations
        outdated = [size for size, one in self._captured.items() if one.relocations != now]
        for size in outdated:
            del self._captured[size]


class Normalising:
    """Normalising on a device, to the same bits as `preprocess.normalise`: copying bytes costs a
    quarter of copying floats."""

    def __init__(self, preprocessing: Preprocessing, *, place: torch.device) -> None:
        self._normalisation = Normalisation.of(
            preprocessing, lambda values: torch.tensor(values, device=place)
        )

    def __call__(self, pixels_NHWC: Tensor) -> Tensor:
        return self._normalisation(pixels_NHWC.float()).permute(0, 3, 1, 2).contiguous()


def graph_sizes(max_batch: int) -> tuple[int, ...]:
    """List the powers of two below the largest batch, and that batch."""
    return (*(1 << power for power in range((max_batch - 1).bit_length())), max_batch)


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
        """Find the memory pool of the other graphs. One pass runs at a time, and its token is read
        before the next, so graphs share memory. torch refuses the pool of a dead graph."""
        other = next(iter(self._graphs), None)
        return None if other is None else other.graph.pool()
