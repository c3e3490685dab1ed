"""The experts in memory, each once, however many versions are served from them.

Experts that follow each other lie in one stack; a version is the first few experts of some
stacks, and a classifier. A branch begins a stack of its own behind the part that it shares.

Belongs to the engine thread, but for `known`. An expert lives as long as a version that uses it:
the bank itself holds on to none.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dne_serve.engines.base import ExpertPath, paths_of
from dne_serve.engines.device import Device, Floats, Passes
from model_store.codec import ShardWeights
from model_store.inference.fold import FoldedExpert, fold_blocks, fold_edges
from model_store.inference.forward import FoldedNetwork, Lineage
from model_store.inference.stacks import Part, Stack
from model_store.inference.workspace import Scratch
from model_store.preprocess import Pixels
from model_store.records.manifest import Manifest
from model_store.spec import NetworkSpec

ROOM = 2
"""Experts for which room is made beside those that are there. More would be idle memory; making
room is cheap, as it goes matrix by matrix."""
MOST_ROOM = 2 * ROOM
"""Room beyond this is given back."""

Key = tuple[object, ExpertPath]
"""The type of large products, and the path of an expert."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Held:
    """An expert in memory; it keeps those before it."""

    before: Held | None
    first: FoldedExpert | None = None
    """The expert itself, where it is the first of its lineage."""
    stack: Stack | None = None
    slot: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class BankedVersion:
    """A version in memory. It keeps its experts, even after the bank was told to let go."""

    experts: tuple[Held, ...]
    network: FoldedNetwork
    passes: Passes
    device: Device

    def covers(self, other: object) -> bool:
        """Whether a pass of this version computes all that `other` reads."""
        if not isinstance(other, BankedVersion) or len(other.experts) > len(self.experts):
            return False
        return self.experts[len(other.experts) - 1] is other.experts[-1]

    def run(self, pixels: Pixels) -> Tensor:
        """The token: [N, channels of all experts]."""
        with torch.inference_mode():
            return self.passes(pixels)

    def logits(self, passed: Tensor, rows: Sequence[int]) -> Floats:
        with torch.inference_mode():
            token = passed if len(rows) == len(passed) else passed[list(rows)]
            return self.device.fetch(self.network.classify(token))


class ExpertBank:
    def __init__(self, *, device: Device) -> None:
        self._device = device
        self._held: WeakValueDictionary[Key, Held] = WeakValueDictionary()
        self._scratch = Scratch()

    def known(
        self, manifest: Manifest, *, matmul_dtype: torch.dtype | None = None
    ) -> tuple[Held, ...]:
        """The experts of a version that are in memory, oldest first, up to the first that is not.
        They stay for as long as the answer is kept. On any thread."""
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
        """The version, in steps of a few milliseconds. Takes the bytes of the experts that are not
        `known`, and of the classifier, out of `shards`. `matmul_dtype`: the type of the large ones,
        where it is not that of the weights; experts in another type are other experts."""
        experts, spec, place = list(known), manifest.spec, self._device.place
        keys = _keys(manifest, matmul_dtype)
        for index in range(len(known), len(manifest.tasks)):
            data = shards.pop(manifest.tasks[index].expert.sha256)
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
        )

    def reclaim(self) -> Iterator[None]:
        """Makes what dead experts occupied in stacks that live on free for others, in steps."""
        self._scratch.clear()  # it knows stacks of versions that have left
        stacks = {held.stack for held in self._held.values() if held.stack is not None}
        for stack in stacks:
            if self._used(stack) < stack.count:
                yield from self._truncate(stack)

    @property
    def experts(self) -> int:
        """How many are in memory."""
        return len(self._held)

    @property
    def bytes(self) -> int:
        """Memory for experts, with the room for more."""
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
        edges = fold_edges(weights, spec=spec)
        blocks = fold_blocks(weights, spec=spec, index=index, matmul_dtype=matmul_dtype)
        shape = spec.tasks[index].expert
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
        """The stack that goes on after `before`, or one that begins there."""
        stack, shape = before.stack, spec.tasks[index].expert
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
    """The last expert that a version uses of a stack says how many of it there are."""
    used = {held.stack: held.slot + 1 for held in experts if held.stack is not None}
    return [Part(stack=stack, count=count) for stack, count in used.items()]
