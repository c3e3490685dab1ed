"""Read the tokens of all training images once, for a classifier on experts that are final."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.network.network import Network
from trainer.data.folders import LabelledImages
from trainer.evaluation.judged import in_batches
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.student import Student
from trainer.progress import Progress

PHASE = "reading tokens"
IMAGES_A_PART = 128
"""Images between two checkpoints."""


def read_tokens(
    student: Student,
    images: LabelledImages,
    *,
    progress: Progress,
    checkpoint: Checkpoint | None = None,
) -> NDArray[np.float32]:
    """Compute [N, W], the token of each image without augmentation. See ADR 14."""
    network = student.network
    parts = [
        np.arange(start, min(start + IMAGES_A_PART, len(images)))
        for start in range(0, len(images), IMAGES_A_PART)
    ]
    state = _Read(network=network, tokens_NW=torch.zeros(len(images), network.spec.token_width))
    done = checkpoint.restore(PHASE, state) if checkpoint is not None else 0
    # Folded after the checkpoint has put the learnt weights back.
    read = student.lineage().token
    with progress.phase(PHASE, total=sum(map(len, parts[done:]))) as phase:
        for number, rows in enumerate(parts[done:], start=done + 1):
            part = in_batches(network, images.take(rows), read, preprocessing=student.preprocessing)
            state.tokens_NW[rows[0] : rows[-1] + 1] = torch.from_numpy(part)
            phase.advance(len(rows))
            if checkpoint is not None:
                checkpoint.save(PHASE, number, state, last=number == len(parts), unit="part")
    return state.tokens_NW.numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """The state of a run in this phase: all learnt weights, and the tokens read so far."""

    network: Network
    tokens_NW: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {name: one.detach().contiguous() for name, one in self._kept().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state. Raise ValueError for tensors of another run."""
        kept = self._kept()
        if {name: one.shape for name, one in tensors.items()} != {
            name: one.shape for name, one in kept.items()
        }:
            raise ValueError("it holds other tensors")
        with torch.no_grad():
            for name, one in kept.items():
                one.copy_(tensors[name])

    def _kept(self) -> dict[str, Tensor]:
        learnt = {id(one) for one in self.network.learnable()}
        weights = {
            f"network.{name}": one
            for name, one in self.network.named_parameters()
            if id(one) in learnt
        }
        return {**weights, "tokens": self.tokens_NW}
