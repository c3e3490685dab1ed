"""The tokens of all training images, read once: for a classifier on experts that are final."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.inference.forward import Lineage
from model_store.network.network import Network
from model_store.records.manifest import Preprocessing
from trainer.data.folders import LabelledImages
from trainer.evaluation.evaluate import in_batches
from trainer.learning.checkpoint import Checkpoint
from trainer.progress import Progress

PHASE = "reading tokens"
IMAGES_A_PART = 128
"""What is kept at once of a run that may be interrupted."""


def read_tokens(
    network: Network,
    images: LabelledImages,
    *,
    preprocessing: Preprocessing,
    progress: Progress,
    checkpoint: Checkpoint | None = None,
) -> NDArray[np.float32]:
    """[N, W]: what the heads read of each image, unchanged by augmentation. See ADR 14."""
    parts = [
        np.arange(start, min(start + IMAGES_A_PART, len(images)))
        for start in range(0, len(images), IMAGES_A_PART)
    ]
    state = _Read(network=network, tokens_NW=torch.zeros(len(images), network.spec.token_width))
    done = checkpoint.restore(PHASE, state) if checkpoint is not None else 0

    whole_token = Lineage.of(network).token
    with progress.phase(PHASE, total=sum(map(len, parts[done:]))) as phase:
        for number, rows in enumerate(parts[done:], start=done + 1):
            part = in_batches(network, images.take(rows), whole_token, preprocessing=preprocessing)
            state.tokens_NW[rows[0] : rows[-1] + 1] = torch.from_numpy(part)
            phase.advance(len(rows))
            if checkpoint is not None:
                checkpoint.save(PHASE, number, state, last=number == len(parts), unit="part")
    return state.tokens_NW.numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What a run has to keep from here on: all that it has learnt, and the tokens so far."""

    network: Network
    tokens_NW: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {name: one.detach().contiguous() for name, one in self._kept().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """ValueError where they are not those of such a run."""
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
