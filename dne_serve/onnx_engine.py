"""Runs batches by onnxruntime: the same network as a graph, written from the same experts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dne_serve.engine import (
    Answers,
    Fetched,
    Floats,
    Model,
    Query,
    ReadShard,
    Resident,
    Steps,
    answer_all,
    read_checked,
    warmed,
)
from dne_serve.precision import Precisions
from model_store.codec import load_network
from model_store.errors import WrongUsage
from model_store.manifest import Manifest, Preprocessing
from model_store.network import Expert
from model_store.onnx.model import OnnxPrecision, network_to_onnx
from model_store.precision import Asked
from model_store.preprocess import Pixels, normalise
from model_store.quality import Reduced


@dataclass(frozen=True, slots=True, eq=False)
class OnnxModel:
    session: Any
    preprocessing: Preprocessing

    def covers(self, other: Model) -> bool:
        return other is self

    def run(self, pixels: Pixels) -> Any:
        images = normalise(pixels, self.preprocessing)
        return self.session.run(["logits"], {"images": images})[0]

    def logits(self, passed: Any, rows: Sequence[int]) -> Floats:
        found: Floats = passed[list(rows)]
        return found


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
        return Fetched(manifest=manifest, shards=read_checked(manifest, needed, read))

    def load(self, fetched: Fetched) -> Steps[Resident]:
        import onnxruntime

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
        model = OnnxModel(session, fetched.manifest.preprocessing)
        return warmed(Resident.of(fetched.manifest, model=model))

    def run(self, widest: Resident, queries: Sequence[Query]) -> Sequence[Answers | Exception]:
        return answer_all(widest, queries)

    def retain(self, residents: Iterable[Resident]) -> Steps[None]:
        used = {task.expert.sha256 for one in residents for task in one.manifest.tasks}
        for digest in self.experts.keys() - used:
            del self.experts[digest]
        yield
