"""What runs batches. `fetch` may be called from any thread; the rest belongs to the engine thread,
because on a CPU a second thread that has ever used OpenMP slows the first one down.

Work that could hold the engine thread for long comes in steps: between two of them it answers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Generator, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dne_serve.precision import Precisions
from model_store.errors import StoreError, WrongUsage
from model_store.manifest import Manifest, ShardRef
from model_store.precision import Asked
from model_store.preprocess import Pixels, normalise
from model_store.quality import Reduced
from model_store.shard import check_shard, expected_tensors

if TYPE_CHECKING:  # torch takes seconds to import: only `choose_engine` does it
    from model_store.network import Expert

Floats = NDArray[np.float32]
ReadShard = Callable[[ShardRef], bytes]
Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""Work in short steps, with its result at the end."""


class ModelUnusable(StoreError):
    """A version whose bytes are in order and whose answers are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A version's manifest and the checked bytes of the shards that are not in memory yet, by
    digest. Loading takes them out."""

    manifest: Manifest
    shards: MutableMapping[str, bytes]
    known: tuple[Any, ...] = ()
    """What is in memory already, kept there until the version is loaded."""


class Model(Protocol):
    """A version as its engine runs it."""

    def forward(self, images: Floats) -> Floats:
        """Normalised images [N, 3, S, S] to logits [N, classes], those of retired classes too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resident:
    """A version in memory, ready to answer."""

    manifest: Manifest
    labels: tuple[str, ...]
    """The classes that are answered, in the order of `run`'s logits."""
    tasks: tuple[str, ...]
    """The task of each label."""
    model: Model

    @classmethod
    def of(cls, manifest: Manifest, *, model: Model) -> Resident:
        pairs = [
            (label, task.name)
            for task in manifest.tasks
            for label in manifest.without_retired(task.classes)
        ]
        labels, tasks = zip(*pairs, strict=True)
        return cls(manifest=manifest, labels=labels, tasks=tasks, model=model)

    @property
    def version(self) -> int:
        return self.manifest.version


class Engine(Protocol):
    backend: str
    device: str

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        """Reads and checks what `load` will need: the shards of experts it does not hold."""

    def load(self, fetched: Fetched) -> Steps[Resident]:
        """Builds the version and runs it once, so that the first request is as fast as the next."""

    def run(self, resident: Resident, pixels: Sequence[Pixels]) -> Sequence[Floats]:
        """The logits of each image, in order: one for each of the resident's labels."""

    def retain(self, residents: Iterable[Resident]) -> Steps[None]:
        """Lets go of the experts that none of `residents` uses."""


def finish(steps: Steps[Result]) -> Result:
    """All steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


class TorchEngine:
    backend = "torch"

    def __init__(self, *, device: str, threads: int | None, max_batch: int = 1) -> None:
        """`max_batch`: images in a batch at most, for which memory is set aside."""
        from dne_serve.bank import ExpertBank
        from model_store.network import choose_device

        self._device = choose_device(device)
        self._threads = threads
        self._max_batch = max_batch
        self.bank = ExpertBank(device=self._device)
        self.device = str(self._device)

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        known = self.bank.known(manifest)
        needed = manifest.model_shards[len(known) :]
        return Fetched(manifest=manifest, shards=_read(manifest, needed, read), known=known)

    def load(self, fetched: Fetched) -> Steps[Resident]:
        import torch

        if self._threads is not None:
            torch.set_num_threads(self._threads)  # counts for the calling thread
        version = yield from self.bank.load(
            fetched.manifest, known=fetched.known, shards=fetched.shards
        )
        version.network.lineage.reserve(self._max_batch)
        yield
        return _warmed(Resident.of(fetched.manifest, model=version))

    def run(self, resident: Resident, pixels: Sequence[Pixels]) -> Sequence[Floats]:
        return _run(resident, pixels)

    def retain(self, residents: Iterable[Resident]) -> Steps[None]:
        yield from self.bank.reclaim()


@dataclass(frozen=True, slots=True, eq=False)
class OnnxModel:
    session: Any

    def forward(self, images: Floats) -> Floats:
        logits: Floats = self.session.run(["logits"], {"images": images})[0]
        return logits


class OnnxEngine:
    """The same network as an ONNX graph, written from the same experts."""

    backend = "onnx"

    def __init__(self, *, device: str, threads: int | None, precision: Asked = "fp32") -> None:
        if importlib.util.find_spec("onnxruntime") is None:
            raise WrongUsage(
                "the backend onnx needs onnxruntime: install dne-serve[onnx], or dne-serve[gpu]"
            )
        import onnxruntime  # type: ignore[import-untyped]

        has_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
        if device == "cuda" and not has_cuda:
            raise WrongUsage("device cuda was asked for, and onnxruntime has no CUDA provider here")
        self.device = "cuda" if has_cuda and device != "cpu" else "cpu"
        self._threads = threads
        offered: tuple[Reduced, ...] = ("int8",) if self.device == "cpu" else ()
        self._precisions = Precisions(precision, offered=offered, backend=self.backend)
        self.experts: dict[str, Expert] = {}

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        self._precisions.of(manifest)  # here, because the engine thread must not wait for it
        needed = [ref for ref in manifest.model_shards if ref.sha256 not in self.experts]
        return Fetched(manifest=manifest, shards=_read(manifest, needed, read))

    def load(self, fetched: Fetched) -> Steps[Resident]:
        import onnxruntime

        from model_store.codec import load_network
        from model_store.onnx.model import OnnxPrecision, network_to_onnx

        network = load_network(
            lambda ref: fetched.shards[ref.sha256], fetched.manifest, known=self.experts
        )
        yield
        chosen = self._precisions.of(fetched.manifest)
        precision: OnnxPrecision = "int8" if chosen == "int8" else "fp32"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads or 0  # 0: as many as there are cores
        gpu = ["CUDAExecutionProvider"] if self.device == "cuda" else []
        session = onnxruntime.InferenceSession(
            network_to_onnx(network, metadata={}, precision=precision).SerializeToString(),
            options,
            providers=[*gpu, "CPUExecutionProvider"],
        )
        yield
        return _warmed(Resident.of(fetched.manifest, model=OnnxModel(session)))

    def run(self, resident: Resident, pixels: Sequence[Pixels]) -> Sequence[Floats]:
        return _run(resident, pixels)

    def retain(self, residents: Iterable[Resident]) -> Steps[None]:
        used = {task.expert.sha256 for one in residents for task in one.manifest.tasks}
        for digest in self.experts.keys() - used:
            del self.experts[digest]
        yield


def choose_engine(
    backend: str,
    *,
    device: str,
    threads: int | None,
    max_batch: int = 1,
    precision: Asked = "auto",
) -> Engine:
    if backend == "onnx":
        return OnnxEngine(device=device, threads=threads, precision=precision)
    Precisions(precision, offered=(), backend=backend)  # torch computes in single precision
    return TorchEngine(device=device, threads=threads, max_batch=max_batch)


def _read(
    manifest: Manifest, needed: Iterable[ShardRef], read: ReadShard
) -> MutableMapping[str, bytes]:
    shards = {}
    for ref in needed:
        shards[ref.sha256] = data = read(ref)
        check_shard(ref, data, expected=expected_tensors(manifest, ref))
    return shards


def _warmed(resident: Resident) -> Resident:
    size = resident.manifest.preprocessing.image_size
    _run(resident, [np.zeros((size, size, 3), dtype=np.uint8)])
    return resident


def _run(resident: Resident, pixels: Sequence[Pixels]) -> Sequence[Floats]:
    logits = resident.model.forward(normalise(np.stack(pixels), resident.manifest.preprocessing))
    if not np.isfinite(logits).all():
        raise ModelUnusable(f"version {resident.version} gives logits that are not finite")
    if resident.manifest.retired:
        logits = logits[:, list(resident.manifest.places)]
    return list(logits)
