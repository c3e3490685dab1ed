"""Define the reference network: for training, and the truth for every other form of it.

`forward` stores nothing on `self`. The caller chooses the device. Shapes: as in `layers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from model_store.network.expert import Block, BlockActivations, Expert, FrozenContext
from model_store.network.readout import ReadoutOf
from model_store.spec import ExpertSpec, NetworkSpec, TaskSpec

HEAD_STD = 0.02


class Network(nn.Module):
    """One expert for each task, oldest first, and one task head for each that reads all tokens."""

    expert_type: ClassVar[type[Expert]] = Expert

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self.spec = spec
        self.readout = ReadoutOf(spec)
        self.experts = nn.ModuleList(
            self.expert_type(spec, index=index) for index in range(len(spec.experts))
        )
        self.heads = nn.ModuleList(
            _task_head(spec.token_width, len(task.classes)) for task in spec.tasks
        )

    @classmethod
    def assemble(
        cls, spec: NetworkSpec, experts: Sequence[Expert], heads: Sequence[nn.Linear]
    ) -> Network:
        """Build a network from existing parts. Experts may be shared with other networks."""
        network = cls(spec.until(0))
        network.spec = spec
        network.experts.extend(experts)
        network.heads.extend(heads)
        return network

    def expand(self, task: TaskSpec) -> None:
        """Add a task head, and an expert if the task has one. Freeze the older experts; no old
        logit changes."""
        where = next(self.parameters(), torch.empty(0)).device
        self._grow(self.spec.expand(task))
        self.heads.append(_task_head(self.spec.token_width, len(task.classes)).to(where))

    def deepen(self, expert: ExpertSpec) -> None:
        """Add an expert to the newest task, which has none. Freeze the older experts; no logit
        changes."""
        self._grow(self.spec.deepen(expert))

    def narrow(self) -> None:
        """Read the first expert's last block alone. The heads forget the earlier blocks."""
        dropped = slice(self.spec.narrow_width, self.spec.slice_width(0))
        self.spec = replace(self.spec, readout=None)
        self.readout = ReadoutOf(self.spec)
        self.heads = nn.ModuleList(_without(head, dropped) for head in _linears(self.heads))

    def _grow(self, spec: NetworkSpec) -> None:
        where = next(self.parameters(), torch.empty(0)).device
        for expert in self._experts():
            expert.freeze()
        heads = [_widened(head, to=spec.token_width) for head in _linears(self.heads)]
        self.heads = nn.ModuleList(heads)
        if len(spec.experts) > len(self.experts):
            self.experts.append(self.expert_type(spec, index=len(self.experts)).to(where))
        self.spec = spec

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Compute the logits [B, classes], in the order of `spec.classes`."""
        return self.classify(self.token_slices(images_BCHW))

    def token_slices(
        self, images_BCHW: Tensor, frozen: FrozenContext | None = None
    ) -> list[Tensor]:
        """Compute the normalised slices of the token, [B, C] for each expert, oldest first.

        With the context of the `frozen` older experts only the newest expert is computed, and the
        slices are two: that of all older experts, and the newest.
        """
        experts = self._experts() if frozen is None else [self.newest]
        states = [expert.embed(images_BCHW) for expert in experts]
        in_sequence, earlier = self.spec.token == "in-sequence", list[Tensor]()
        for layer in range(self.spec.depth - in_sequence):
            blocks = [expert.patch_block(layer) for expert in experts]
            states = _mix_all(blocks, self.attend_all(blocks, states), _older_in(frozen, layer))
            if frozen is None:
                earlier += self.readout.read(layer + 1, states[0])
        if not in_sequence:
            states = [expert.with_token(x) for expert, x in zip(experts, states, strict=True)]
        # No block reads the patches after the last one, so the last computes the token alone.
        blocks = [expert.last_block for expert in experts]
        attended = self.attend_all(blocks, states, queries=1)
        tokens = _mix_all(blocks, attended, _older_in(frozen, -1))
        first, *later = (expert.pool(x) for expert, x in zip(experts, tokens, strict=True))
        slices = [torch.cat((first, *earlier), dim=-1), *later]
        return slices if frozen is None else [frozen.token_BC, *slices]

    def attend_all(
        self, blocks: Sequence[Block], states: Sequence[Tensor], *, queries: int | None = None
    ) -> list[Tensor]:
        """Compute the first half of a layer's blocks. Every expert attends to itself alone."""
        return [
            block.attend(x_BPC, queries=queries)
            for block, x_BPC in zip(blocks, states, strict=True)
        ]

    def classify(self, slices: Sequence[Tensor], heads: nn.ModuleList | None = None) -> Tensor:
        """Compute logits from token slices. Heads of an older version read the first slices."""
        chosen = self.heads if heads is None else heads
        token_BC = torch.cat(tuple(slices), dim=-1)
        return torch.cat(
            [head(token_BC[:, : head.in_features]) for head in _linears(chosen)], dim=-1
        )

    def auxiliary_head(self) -> nn.Linear:
        """Create a head for training: "an older class", then the newest expert's classes."""
        newest = self.spec.classes_of_newest_expert
        return _task_head(self.spec.token_width, 1 + len(newest)).to(self.device)

    def learnable(self) -> list[nn.Parameter]:
        """List the parameters that learning a task may change: its expert, if it has one, and all
        heads."""
        expert = self.newest.learnable() if self.spec.tasks[-1].expert else []
        return [*expert, *self.heads.parameters()]

    def tunable(self) -> list[nn.Parameter]:
        """List the parameters of balanced tuning: newest token, its last block, and all heads."""
        newest = self.newest
        return [newest.token, *newest.last_block.parameters(), *self.heads.parameters()]

    @property
    def newest(self) -> Expert:
        return self._experts()[-1]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def _experts(self) -> list[Expert]:
        return [expert for expert in self.experts if isinstance(expert, Expert)]


def _mix_all(
    blocks: Iterable[Block], attended: Iterable[Tensor], known: Sequence[BlockActivations]
) -> list[Tensor]:
    older, outs = list(known), []
    for block, s_BPC in zip(blocks, attended, strict=True):
        mixed = block.mix(s_BPC, older)
        older.append(mixed)
        outs.append(mixed.out)
    return outs


def _older_in(frozen: FrozenContext | None, layer: int) -> Sequence[BlockActivations]:
    return () if frozen is None else (frozen.blocks[layer],)


def _linears(heads: nn.ModuleList) -> list[nn.Linear]:
    return [head for head in heads if isinstance(head, nn.Linear)]


def _task_head(width: int, classes: int) -> nn.Linear:
    head = nn.Linear(width, classes)
    nn.init.trunc_normal_(head.weight, std=HEAD_STD)
    nn.init.zeros_(head.bias)
    return head


def _widened(head: nn.Linear, *, to: int) -> nn.Linear:
    """Copy a head to a wider token, with zeros for the new columns, so that its logits stay."""
    wider = nn.Linear(to, head.out_features, device=head.weight.device)
    with torch.no_grad():
        wider.weight.zero_()
        wider.weight[:, : head.in_features] = head.weight
        wider.bias.copy_(head.bias)
    return wider


def _without(head: nn.Linear, columns: slice) -> nn.Linear:
    """Copy a head without some of its columns."""
    kept = torch.ones(head.in_features, dtype=torch.bool)
    kept[columns] = False
    narrower = nn.Linear(int(kept.sum()), head.out_features, device=head.weight.device)
    with torch.no_grad():
        narrower.weight.copy_(head.weight[:, kept.to(head.weight.device)])
        narrower.bias.copy_(head.bias)
    return narrower
