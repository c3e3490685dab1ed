"""What runs batches. `fetch` may be called from any thread; the rest belongs to the engine thread,
because on a CPU a second thread that has ever used OpenMP slows the first one down.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from model_store.errors import StoreError, WrongUsage
from model_store.manifest import Manifest, ShardRef
from model_store.preprocess import Pixels, normalise

if TYPE_CHECKING:  # torch takes seconds to import: only `choose_engine` does it
    from model_store.network import Expert

Floats = NDArray[np.float32]
ReadShard = Callable[[ShardRef], bytes]


class ModelUnusable(StoreError):
    """A version whose bytes are in order and whose answers are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A version's manifest and the bytes of the shards that are not in memory yet, by digest."""

    manifest: Manifest
    shards: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resident:
    """A version in memory, ready to answer."""

    manifest: Manifest
    labels: tuple[str, ...]
    """The classes that are answered, in the order of `run`'s logits."""
    tasks: tuple[str, ...]
    """The task of each label."""
    forward: Callable[[Floats], Floats]
    """Normalised images [N, 3, S, S] to logits [N, classes], those of retired classes too."""

    @classmethod
    def of(cls, manifest: Manifest, *, forward: Callable[[Floats], Floats]) -> Resident:
        pairs = [
            (label, task.name)
            for task in manifest.tasks
            for label in manifest.without_retired(task.classes)
        ]
        labels, tasks = zip(*pairs, strict=True)
        return cls(manifest=manifest, labels=labels, tasks=tasks, forward=forward)

    @property
    def version(self) -> int:
        return self.manifest.version


class Engine(Protocol):
    backend: str
    device: str

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        """Reads and checks what `load` will need: the shards of experts it does not hold."""

    def load(self, fetched: Fetched) -> Resident:
        """Builds the version and runs it once, so that the first request is as fast as the next."""

    def run(self, resident: Resident, pixels: Sequence[Pixels]) -> Sequence[Floats]:
        """The logits of each image, in order: one for each of the resident's labels."""

    def retain(self, residents: Iterable[Resident]) -> None:
        """Lets go of the experts that none of `residents` uses."""


class ExpertBank:
    """The experts in memory by shard digest, shared by all versions that are resident."""

    def __init__(self) -> None:
        self.experts: dict[str, Expert] = {}

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        needed = [ref for ref in manifest.model_shards if ref.sha256 not in self.experts]
        return Fetched(manifest=manifest, shards={ref.sha256: read(ref) for ref in needed})

    def retain(self, residents: Iterable[Resident]) -> None:
        used = {task.expert.sha256 for one in residents for task in one.manifest.tasks}
        for digest in self.experts.keys() - used:
            del self.experts[digest]


class TorchEngine:
    backend = "torch"

    def __init__(self, *, device: str, threads: int | None) -> None:
        from model_store.network import choose_device

        self._device = choose_device(device)
        self._threads = threads
        self._bank = ExpertBank()
        self.device = str(self._device)

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        return self._bank.fetch(manifest, read=read)

    def load(self, fetched: Fetched) -> Resident:
        import torch

        from model_store.codec import load_network

        if self._threads is not None:
            torch.set_num_threads(self._threads)  # counts for the calling thread
        network = load_network(
            lambda ref: fetched.shards[ref.sha256], fetched.manifest, known=self._bank.experts
        ).to(self._device)

        def forward(images: Floats) -> Floats:
            with torch.inference_mode():
                logits: Floats = network(torch.from_numpy(images).to(self._device)).cpu().numpy()
            return logits

        return _warmed(Resident.of(fetched.manifest, forward=forward))

    def run(self, resident: Resident, pixels: Sequence[Pixels]) -> Sequence[Floats]:
        return _run(resident, pixels)

    def retain(self, residents: Iterable[Resident]) -> None:
        self._bank.retain(residents)


class OnnxEngine:
    """The same network as an ONNX graph, written from the same experts."""

    backend = "onnx"

    def __init__(self, *, device: str, threads: int | None) -> None:
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
        self._bank = ExpertBank()

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        return self._bank.fetch(manifest, read=read)

    def load(self, fetched: Fetched) -> Resident:
        import onnxruntime

        from model_store.codec import load_network
        from model_store.onnx import network_to_onnx

        network = load_network(
            lambda ref: fetched.shards[ref.sha256], fetched.manifest, known=self._bank.experts
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads or 0  # 0: as many as there are cores
        gpu = ["CUDAExecutionProvider"] if self.device == "cuda" else []
        session = onnxruntime.InferenceSession(
            network_to_onnx(network, metadata={}).SerializeToString(),
            options,
            providers=[*gpu, "CPUExecutionProvider"],
        )

        def forward(images: Floats) -> Floats:
            logits: Floats = session.run(["logits"], {"images": images})[0]
            return logits

        return _warmed(Resident.of(fetched.manifest, forward=forward))

    def run(self, resident: Resident, pixels: Sequence[Pixels]) -> Sequence[Floats]:
        return _run(resident, pixels)

    def retain(self, residents: Iterable[Resident]) -> None:
        self._bank.retain(residents)


def choose_engine(backend: str, *, device: str, threads: int | None) -> Engine:
    if backend == "onnx":
        return OnnxEngine(device=device, threads=threads)
    return TorchEngine(device=device, threads=threads)


def _warmed(resident: Resident) -> Resident:
    size = resident.manifest.preprocessing.image_size
    _run(resident, [np.zeros((size, size, 3), dtype=np.uint8)])
    return resident


def _run(resident: Resident, pixels: Sequence[Pixels]) -> Sequence[Floats]:
    logits = resident.forward(normalise(np.stack(pixels), resident.manifest.preprocessing))
    if not np.isfinite(logits).all():
        raise ModelUnusable(f"version {resident.version} gives logits that are not finite")
    if resident.manifest.retired:
        logits = logits[:, list(resident.manifest.places)]
    return list(logits)
