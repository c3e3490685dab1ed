"""Run batches by onnxruntime: the network as a graph, over arrays that all versions share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence

import torch

from dne_serve.engines.base import (
    Answers,
    Fetched,
    Precisions,
    Query,
    ReadShard,
    Resident,
    Steps,
    answer_all,
    read_checked,
    warmed,
)
from dne_serve.engines.onnx_bank import ArrayBank
from dne_serve.engines.thread_plan import ThreadPlan
from model_store.errors import WrongUsage
from model_store.onnx.model import OnnxPrecision
from model_store.precision import Asked
from model_store.records.manifest import Manifest
from model_store.records.quality import Reduced


class OnnxEngine:
    """An engine that builds a version in `fetch`, beside the workers: they go on answering, and one
    of them shows in `load` that the version's logits are finite."""

    backend = "onnx"

    def __init__(
        self,
        *,
        device: str,
        threads: int | None,
        precision: Asked = "fp32",
        workers: int | None = None,
        pack: bool = False,
        choice: str = "onnx",
    ) -> None:
        if importlib.util.find_spec("onnxruntime") is None:
            raise WrongUsage(
                "the backend onnx needs onnxruntime: install dne-serve[onnx], or dne-serve[gpu]"
            )
        import onnxruntime

        has_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
        if device == "cuda" and not has_cuda:
            raise WrongUsage("device cuda was asked for, and onnxruntime has no CUDA provider here")
        self.choice = choice
        self.device = "cuda" if has_cuda and device != "cpu" else "cpu"
        offered: tuple[Reduced, ...] = ("int8",) if self.device == "cpu" else ()
        self._precisions = Precisions(precision, offered=offered, backend=self.backend)
        plan = ThreadPlan.of(threads=threads, workers=workers if self.device == "cpu" else 1)
        self.workers = plan.workers
        self.bank = ArrayBank(device=self.device, plan=plan, pack=pack)

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        chosen = self._precisions.of(manifest)
        precision: OnnxPrecision = "int8" if chosen == "int8" else "fp32"
        known = self.bank.known(manifest, precision=precision)
        shards = read_checked(manifest, manifest.model_shards[len(known) :], read)
        torch.set_num_threads(1)  # counts for the calling thread: folding must not slow passes
        version = self.bank.load(manifest, precision=precision, known=known, shards=shards)
        return Fetched(manifest=manifest, shards=shards, known=(version,))

    def load(self, fetched: Fetched) -> Steps[Resident]:
        (version,) = fetched.known
        yield  # what has come in meanwhile is answered first
        return warmed(Resident.of(fetched.manifest, model=version))

    def run(self, widest: Resident, queries: Sequence[Query]) -> Sequence[Answers | Exception]:
        return answer_all(widest, queries)

    def retain(self, residents: Iterable[Resident]) -> Steps[None]:
        yield from ()  # arrays go with the last version that uses them
