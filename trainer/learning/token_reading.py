"""Read the tokens of all training images once, for a classifier on experts that are final."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.inference.forward import Lineage
from model_store.network.network import Network
from model_store.records.quality import Reduced
from trainer.data.folders import LabelledImages
from trainer.embeddings.cache import EmbeddingCache, Floats
from trainer.embeddings.reading import Read, begun_late, reader_of
from trainer.evaluation.precision_agreement import FORMS, ReadEmbeddings
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.student import Student
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, Ranks

READING = "reading embeddings"
IMAGES_A_PART = 128
"""Images between two checkpoints."""


def cache_of(student: Student, experts: Lineage, *, folder: Path | None) -> EmbeddingCache:
    """Open the tokens of a student whose `experts` are final.

    Experts from scratch are other ones in every version, so theirs are not worth a file.
    """
    return EmbeddingCache(
        student.network,
        reader_of(student.network, experts),
        preprocessing=student.preprocessing,
        folder=folder if student.on_pretrained else None,
    )


def parent_cache_of(student: Student, *, folder: Path | None) -> EmbeddingCache | None:
    """Open the tokens by the parent's experts; None where they are those of the student."""
    if student.parent is None:
        return None
    return EmbeddingCache(
        student.parent,
        reader_of(student.parent, Lineage.of(student.parent)),
        preprocessing=student.preprocessing,
        folder=folder,
    )


def reduced_tokens_of(
    student: Student, *, folder: Path | None, progress: Progress
) -> ReadEmbeddings:
    """Make a reader of tokens in reduced precisions, which keeps them as `cache_of` does."""

    def read(precision: Reduced, make: Callable[[], Read], images: LabelledImages) -> Floats:
        cache = EmbeddingCache(
            student.network,
            begun_late(make),
            preprocessing=student.preprocessing,
            folder=folder if student.on_pretrained else None,
            precision=FORMS[precision],
        )
        with progress.phase(f"comparing with {precision}", total=len(images)) as phase:
            tokens_NW = cache.embeddings(images, advance=phase.advance)
        cache.save()
        return tokens_NW

    return read


def read_tokens(
    student: Student,
    images: LabelledImages,
    *,
    folder: Path | None,
    progress: Progress,
    checkpoint: Checkpoint | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Floats, EmbeddingCache]:
    """Compute [N, W], the token of each image without augmentation. See ADR 14.

    Tokens that an earlier run has left in `folder` are not computed again. The ranks take parts in
    turn, so a part is computed in the same batches whatever their number is.
    """
    network = student.network
    parts = [
        np.arange(start, min(start + IMAGES_A_PART, len(images)))
        for start in range(0, len(images), IMAGES_A_PART)
    ]
    state = _Read(network=network, tokens_NW=torch.zeros(len(images), network.spec.token_width))
    done = checkpoint.restore(READING, state) if checkpoint is not None else 0
    # Folded after the checkpoint has put the learnt weights back.
    cache = cache_of(student, student.lineage(), folder=folder)
    cache.prove(images)
    with progress.phase(READING, total=sum(map(len, parts[done:]))) as phase:
        for first in range(done, len(parts), ranks.count):
            turn = parts[first : first + ranks.count]
            read = _read_turn(cache, images, turn, ranks, advance=phase.advance)
            for rows, tokens_PW in zip(turn, read, strict=True):
                state.tokens_NW[rows[0] : rows[-1] + 1] = torch.from_numpy(tokens_PW)
            number = first + len(turn)
            if checkpoint is not None:
                checkpoint.save(READING, number, state, last=number == len(parts), unit="part")
    if ranks.rank == 0:
        cache.save()
    return state.tokens_NW.numpy(), cache


def _read_turn(
    cache: EmbeddingCache,
    images: LabelledImages,
    parts: Sequence[NDArray[np.int64]],
    ranks: Ranks,
    *,
    advance: Callable[[int], None],
) -> list[Floats]:
    """Read one part, and get the others from the ranks that read them."""
    if ranks.count == 1:
        return [cache.embeddings(images.take(rows), advance=advance) for rows in parts]
    mine = b""
    if ranks.rank < len(parts):
        mine = cache.embeddings(images.take(parts[ranks.rank])).tobytes()
    read = [
        np.frombuffer(bytearray(data), dtype=np.float32).reshape(len(rows), -1)
        for rows, data in zip(parts, ranks.gathered(mine), strict=False)
    ]
    for rows, tokens_PW in zip(parts, read, strict=True):
        cache.know(images.take(rows), tokens_PW)
        advance(len(rows))
    return read


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
