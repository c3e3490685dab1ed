"""Run batches by torch: the folded form of the network, over experts that all versions share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from dne_serve.engines.base import (
    Answers,
    ExpertPath,
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
from dne_serve.engines.torch_device import Cpu, Cuda, Device, Floats, Gpu, Passes
from model_store.codec import ShardWeights
from model_store.inference.doubt import Doubt
from model_store.inference.fold import FoldedExpert, fold_blocks, fold_edges
from model_store.inference.forward import FoldedNetwork, Lineage
from model_store.inference.stacks import Part, Stack
from model_store.inference.workspace import Scratch
from model_store.network.device import choose_device
from model_store.precision import Asked, Trial, try_out
from model_store.preprocess import Pixels
from model_store.records.manifest import Manifest
from model_store.spec import NetworkSpec

ROOM = 2
"""Spare slots of a stack. More would be idle memory, and adding slots later is cheap: it goes
matrix by matrix."""
MOST_ROOM = 2 * ROOM
"""Spare slots beyond this number are given back."""

Key = tuple[object, ExpertPath]
"""The type of large products, and the path of an expert."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Held:
    """An expert in memory. It keeps the experts before it alive."""

    before: Held | None
    first: FoldedExpert | None = None
    """The first expert of a lineage itself; None for later ones, which lie in a stack."""
    stack: Stack | None = None
    slot: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class BankedVersion:
    """A version in memory. It keeps its experts alive."""

    experts: tuple[Held, ...]
    network: FoldedNetwork
    passes: Passes
    device: Device
    doubt: Doubt | None = None

    def covers(self, other: object) -> bool:
        """Return whether a pass of this version computes all that `other` reads."""
        if not isinstance(other, BankedVersion) or len(other.experts) > len(self.experts):
            return False
        return self.experts[len(other.experts) - 1] is other.experts[-1]

    def run(self, pixels: Pixels) -> Tensor:
        """Compute the token: [N, channels of all experts]."""
        with torch.inference_mode():
            return self.passes(pixels)

    def logits(self, passed: Tensor, rows: Sequence[int]) -> Floats:
        with torch.inference_mode():
            logits = self.network.classify(
                passed
            )  # of all rows: the last bits depend on their number
            return self.device.fetch(logits if len(rows) == len(passed) else logits[list(rows)])

    def log_odds(self, passed: Tensor, rows: Sequence[int]) -> Floats | None:
        if self.doubt is None:
            return None
        with torch.inference_mode():
            return self.doubt.log_odds(self.device.fetch(passed[list(rows), : self.doubt.width]))

    def tokens(self, passed: Tensor, rows: Sequence[int], *, width: int) -> Floats:
        with torch.inference_mode():
            return self.device.fetch(passed[list(rows), :width])


class ExpertBank:
    """The experts in memory, found by their ancestry."""

    def __init__(self, *, device: Device) -> None:
        self._device = device
        self._held: WeakValueDictionary[Key, Held] = WeakValueDictionary()
        self._scratch = Scratch()

    def known(
        self, manifest: Manifest, *, matmul_dtype: torch.dtype | None = None
    ) -> tuple[Held, ...]:
        """Find the experts of a version that are in memory, oldest first, up to the first gap. They
        stay in memory as long as the caller keeps the result. Any thread may call this."""
        found: list[Held] = []
        for key in _keys(manifest, matmul_dtype):
            held = self._held.get(key)
            if held is None:
                break
            found.append(held)
        return tuple(found)

    def load(
        self,
        manifest: Manifest,
        *,
        known: Sequence[Held],
        shards: MutableMapping[str, bytes],
        matmul_dtype: torch.dtype | None = None,
    ) -> Generator[None, None, BankedVersion]:
        """Build a version, in steps of a few milliseconds. Take the bytes of the experts that are
        not `known`, of the classifier and of the doubt out of `shards`. `matmul_dtype`: the type of
        large products, if it is not that of the weights; experts in another type are other
        experts."""
        experts, spec, place = list(known), manifest.spec, self._device.place
        keys = _keys(manifest, matmul_dtype)
        for index in range(len(known), len(manifest.experts)):
            data = shards.pop(manifest.experts[index].sha256)
            weights = ShardWeights(data, prefix=f"experts.{index}.", device=place)
            before = experts[-1] if experts else None
            held = yield from self._take_in(
                weights, spec=spec, index=index, before=before, matmul_dtype=matmul_dtype
            )
            self._held[keys[index]] = held
            experts.append(held)
        heads = ShardWeights(shards.pop(manifest.classifier.sha256), device=place)
        lineage = Lineage(spec, first=_first(experts), parts=_parts(experts), scratch=self._scratch)
        network = FoldedNetwork.classified(lineage, heads)
        return BankedVersion(
            experts=tuple(experts),
            network=network,
            passes=self._device.passes(lineage, preprocessing=manifest.preprocessing),
            device=self._device,
            doubt=take_doubt(manifest, shards),
        )

    def reclaim(self) -> Iterator[None]:
        """Free the slots of dead experts in stacks that live on, in steps."""
        self._scratch.clear()  # it knows stacks of versions that have left
        stacks = {held.stack for held in self._held.values() if held.stack is not None}
        for stack in stacks:
            if self._used(stack) < stack.count:
                yield from self._truncate(stack)

    @property
    def experts(self) -> int:
        """Count the experts in memory."""
        return len(self._held)

    @property
    def bytes(self) -> int:
        """Bytes of all experts in memory, with spare slots."""
        held = list(self._held.values())
        stacks = {one.stack for one in held if one.stack is not None}
        firsts = (tensor for one in held if one.first for _, tensor in one.first.tensors())
        return sum(stack.bytes for stack in stacks) + sum(tensor.nbytes for tensor in firsts)

    def _take_in(
        self,
        weights: ShardWeights,
        *,
        spec: NetworkSpec,
        index: int,
        before: Held | None,
        matmul_dtype: torch.dtype | None,
    ) -> Generator[None, None, Held]:
        edges = fold_edges(weights, spec=spec, index=index)
        blocks = fold_blocks(weights, spec=spec, index=index, matmul_dtype=matmul_dtype)
        shape = spec.experts[index]
        if before is None:
            folded = []
            for block in blocks:
                folded.append(block)
                yield
            first = FoldedExpert(
                heads=shape.heads,
                attention_heads=shape.attention_heads,
                edges=edges,
                blocks=tuple(folded),
            )
            return Held(None, first=first)
        stack = yield from self._stack_after(before, spec=spec, index=index)
        following = spec.run_of(index).experts.stop - index - 1
        # A lone expert may be a branch that never grows.
        room = following + (ROOM if stack.count or following else 0)
        yield from stack.appending(edges, blocks, room=room)
        return Held(before, stack=stack, slot=stack.count - 1)

    def _stack_after(
        self, before: Held, *, spec: NetworkSpec, index: int
    ) -> Generator[None, None, Stack]:
        """Find the stack that goes on after `before`, or begin one there."""
        stack, shape = before.stack, spec.experts[index]
        if stack is not None and stack.fits(shape.heads, shape.attention_heads):
            if self._used(stack) < stack.count:
                yield from self._truncate(stack)
            if before.slot == stack.count - 1:
                return stack
        return Stack(
            before=spec.source_heads(index - 1),
            heads=shape.heads,
            attention_heads=shape.attention_heads,
            blocks=len(spec.blocks),
        )

    def _used(self, stack: Stack) -> int:
        slots = (held.slot for held in self._held.values() if held.stack is stack)
        return max(slots, default=-1) + 1

    def _truncate(self, stack: Stack) -> Iterator[None]:
        return stack.truncating(self._used(stack), room=MOST_ROOM)


def _keys(manifest: Manifest, matmul_dtype: torch.dtype | None) -> list[Key]:
    return [(matmul_dtype, path) for path in paths_of(manifest)]


def _first(experts: Sequence[Held]) -> FoldedExpert:
    first = experts[0].first
    assert first is not None
    return first


def _parts(experts: Sequence[Held]) -> list[Part]:
    """Find the stacks of a version, and how many experts of each it uses: up to its last one."""
    used = {held.stack: held.slot + 1 for held in experts if held.stack is not None}
    return [Part(stack=stack, count=count) for stack, count in used.items()]


class TorchEngine:
    backend = "torch"
    workers = 1  # its passes share the memory they compute in

    def __init__(
        self,
        *,
        device: str | Device,
        threads: int | None,
        max_batch: int = 1,
        precision: Asked = "fp32",
        choice: str = "torch",
        try_out: Callable[..., Trial] = try_out,
    ) -> None:
        """Open a device that is given by its name, and set memory aside for `max_batch` images."""
        opened = open_device(device, max_batch=max_batch) if isinstance(device, str) else device
        self._threads = threads
        self.choice = choice
        self._precisions = Precisions(
            precision,
            offered=("bf16",),
            backend=self.backend,
            try_out=partial(try_out, device=opened.place.type),
        )
        self.bank = ExpertBank(device=opened)
        self.device = str(opened.place)
        self._versions: WeakSet[BankedVersion] = WeakSet()

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        matmul_dtype = self._matmul_dtype(manifest)  # here, as a worker must not wait for a trial
        known = self.bank.known(manifest, matmul_dtype=matmul_dtype)
        needed = manifest.model_shards[len(known) :]
        return Fetched(manifest=manifest, shards=read_checked(manifest, needed, read), known=known)

    def load(self, fetched: Fetched) -> Steps[Resident]:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # counts for the calling thread
        version = yield from self.bank.load(
            fetched.manifest,
            known=fetched.known,
            shards=fetched.shards,
            matmul_dtype=self._matmul_dtype(fetched.manifest),
        )
        yield from version.passes.prepare()
        resident = warmed(Resident.of(fetched.manifest, model=version))
        yield from self._renew()  # the bank may have moved what others had prepared for
        self._versions.add(version)
        return resident

    def run(self, widest: Resident, queries: Sequence[Query]) -> Sequence[Answers | Exception]:
        return answer_all(widest, queries)

    def retain(self, residents: Iterable[Resident]) -> Steps[None]:
        yield from self.bank.reclaim()
        yield from self._renew()

    def _matmul_dtype(self, manifest: Manifest) -> torch.dtype | None:
        return torch.bfloat16 if self._precisions.of(manifest) == "bf16" else None

    def _renew(self) -> Steps[None]:
        for found in [weakref.ref(version) for version in self._versions]:
            version = found()  # one at a time: others may leave meanwhile
            if version is not None:
                yield from version.passes.renew()


def open_device(name: str, *, max_batch: int) -> Device:
    """Open a device with memory for batches of `max_batch` images; WrongUsage if it is absent."""
    place = choose_device(name)
    if place.type != "cuda":
        return Cpu(max_batch=max_batch)
    return Gpu(Cuda(place), max_batch=max_batch)
