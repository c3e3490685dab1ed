"""Run batches by onnxruntime: the network as a graph, over arrays that all versions share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from dne_serve.engines.base import (
    Answers,
    Fetched,
    Precisions,
    Query,
    ReadShard,
    Resident,
    Steps,
    answer_all,
    paths_of,
    read_checked,
    take_doubt,
    warmed,
)
from dne_serve.engines.candidates import ThreadPlan, UnderWay
from model_store.codec import ShardWeights
from model_store.errors import WrongUsage
from model_store.inference.doubt import Doubt
from model_store.onnx.model import (
    SAFE,
    OnnxPrecision,
    Weights,
    arrays_of_expert,
    arrays_of_heads,
    largest_here,
)
from model_store.onnx.session import Session
from model_store.onnx.weights import Arrays
from model_store.precision import Asked, Trial, try_out
from model_store.preprocess import Pixels, normalise
from model_store.records.manifest import Manifest, Preprocessing
from model_store.records.quality import Reduced

Floats = NDArray[np.float32]
Key = tuple[object, ...]
"""The precision, and the path of an expert."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HeldArrays:
    """An expert in memory, in one precision."""

    arrays: Arrays

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class HeldLineage:
    """The experts of a version and the sessions that compute its token."""

    experts: tuple[HeldArrays, ...]
    alone: Session
    """A session with all threads, for a single image."""
    beside: Session
    """A session with a worker's share of the threads; equal to `alone` for one worker."""
    under_way: UnderWay

    def token(self, images: Floats) -> Floats:
        """Run a pass. Several images announce others, and the other workers need their threads."""
        with self.under_way.one() as alone:
            return (self.alone if alone and len(images) == 1 else self.beside)(images)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnnxVersion:
    """A version in memory. It keeps its lineage."""

    lineage: HeldLineage
    preprocessing: Preprocessing
    weight_YC: Floats
    bias_Y: Floats
    doubt: Doubt | None = None

    def covers(self, other: object) -> bool:
        """Return whether a pass of this version computes all that `other` reads. The same experts
        in another precision are other experts."""
        if not isinstance(other, OnnxVersion):
            return False
        own, others = self.lineage.experts, other.lineage.experts
        return len(others) <= len(own) and own[len(others) - 1] is others[-1]

    def run(self, pixels: Pixels) -> Floats:
        """Compute the token: [N, channels of all experts]."""
        return self.lineage.token(normalise(pixels, self.preprocessing))

    def logits(self, passed: Floats, rows: Sequence[int]) -> Floats:
        token = passed[list(rows), : self.weight_YC.shape[1]]
        # Not `@`: the library behind it begins threads of its own beside those of the runtime,
        # and takes longer with them than the product does.
        found: Floats = np.einsum("nc,yc->ny", token, self.weight_YC)
        return found + self.bias_Y

    def log_odds(self, passed: Floats, rows: Sequence[int]) -> Floats | None:
        return None if self.doubt is None else self.doubt.log_odds(passed[list(rows)])

    def tokens(self, passed: Floats, rows: Sequence[int], *, width: int) -> Floats:
        return passed[list(rows), :width]


class ArrayBank:
    """The experts and lineages in memory, found by their ancestry."""

    def __init__(self, *, device: str, plan: ThreadPlan, pack: bool = False) -> None:
        self._device = device
        self._pack = pack
        self._plan = plan
        self._under_way = UnderWay()
        self._experts: WeakValueDictionary[Key, HeldArrays] = WeakValueDictionary()
        self._lineages: WeakValueDictionary[Key, HeldLineage] = WeakValueDictionary()

    def known(self, manifest: Manifest, *, precision: OnnxPrecision) -> tuple[HeldArrays, ...]:
        """Find the experts of a version that are in memory, oldest first, up to the first gap. They
        stay in memory as long as the caller keeps the result."""
        found: list[HeldArrays] = []
        for path in paths_of(manifest):
            held = self._experts.get((precision, *path))
            if held is None:
                break
            found.append(held)
        return tuple(found)

    def load(
        self,
        manifest: Manifest,
        *,
        precision: OnnxPrecision,
        known: Sequence[HeldArrays],
        shards: MutableMapping[str, bytes],
    ) -> OnnxVersion:
        """Build a version. Take the bytes of the experts that are not `known`, of the
        classifier and of the doubt out of `shards`."""
        experts, spec = list(known), manifest.spec
        keys: list[Key] = [(precision, *path) for path in paths_of(manifest)]
        largest = largest_here() if precision == "int8" else SAFE
        for index in range(len(known), len(manifest.experts)):
            data = shards.pop(manifest.experts[index].sha256)
            weights = ShardWeights(data, prefix=f"experts.{index}.")
            arrays = arrays_of_expert(
                weights, spec=spec, index=index, precision=precision, largest=largest
            )
            held = HeldArrays(arrays)
            self._experts[keys[index]] = held
            experts.append(held)
        heads = ShardWeights(shards.pop(manifest.classifier.sha256), prefix="heads.")
        classifier = arrays_of_heads(heads, spec=spec)
        return OnnxVersion(
            lineage=self._lineage(manifest, key=keys[-1], experts=experts),
            preprocessing=manifest.preprocessing,
            weight_YC=np.ascontiguousarray(classifier["weight"].T),
            bias_Y=classifier["bias"],
            doubt=take_doubt(manifest, shards),
        )

    @property
    def experts(self) -> int:
        """Count the experts in memory; one in two precisions counts twice."""
        return len(self._experts)

    @property
    def bytes(self) -> int:
        """Bytes of all experts in memory."""
        return sum(held.bytes for held in list(self._experts.values()))

    def _lineage(
        self, manifest: Manifest, *, key: Key, experts: Sequence[HeldArrays]
    ) -> HeldLineage:
        found = self._lineages.get(key)
        if found is None:
            parts = {f"experts.{index}": held.arrays for index, held in enumerate(experts)}
            weights = Weights(spec=manifest.spec, parts=parts)
            alone = self._session(weights, threads=self._plan.threads)
            beside = alone
            if self._plan.workers > 1:
                beside = self._session(weights, threads=self._plan.share)
            found = HeldLineage(
                experts=tuple(experts), alone=alone, beside=beside, under_way=self._under_way
            )
            self._lineages[key] = found
        return found

    def _session(self, weights: Weights, *, threads: int) -> Session:
        return Session(weights, threads=threads, device=self._device, pack=self._pack)


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
        try_out: Callable[..., Trial] = try_out,
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
        self._precisions = Precisions(
            precision, offered=offered, backend=self.backend, try_out=try_out
        )
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
