"""Name all that learning needs to know of other processes, and fill it for a process alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from model_store.errors import DneError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """The images of a batch that one rank learns from: `start` to `stop` of `whole`.

    A rank without images takes the first one and gives it no weight, because all ranks must take
    part in every step.
    """

    start: int
    stop: int
    whole: int
    ranks: int

    @classmethod
    def of(cls, whole: int, *, rank: int = 0, ranks: int = 1) -> BatchPart:
        """Cut into parts of almost equal size, the larger ones first, as numpy.array_split does."""
        least, more = divmod(whole, ranks)
        start = rank * least + min(rank, more)
        return cls(start=start, stop=start + least + (rank < more), whole=whole, ranks=ranks)

    @property
    def images(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        """Return the places in the batch that the rank computes."""
        return slice(self.start, self.stop) if self.images else slice(0, 1)

    @property
    def weight(self) -> float:
        """Return the factor of the part's mean loss: the mean over ranks is then that of all."""
        return self.ranks * self.images / self.whole


LossAndRight = tuple[Tensor, Tensor]
Forward = Callable[[Tensor, Tensor], LossAndRight]
"""Compute the mean loss and the number of right answers of images and labels."""


class RankLost(DneError):
    """Another process of the run has ended."""


class Ranks(Protocol):
    """The processes that learn one version together. All of them make the same calls in the same
    order: each call waits for the others. A call raises RankLost if one of them is gone."""

    rank: int
    count: int

    def spread(self, forward: Forward, parameters: Sequence[nn.Parameter]) -> Forward:
        """Let gradients of `parameters` become the mean over all ranks in every backward pass."""

    def watched(self) -> AbstractContextManager[None]:
        """Name the loss of a rank inside the block: a backward pass does not say it clearly."""

    def total(self, *values: float) -> tuple[float, ...]:
        """Sum each value over all ranks."""

    def from_first(self, data: bytes) -> bytes:
        """Return the bytes that the first rank gave."""

    def gathered(self, data: bytes) -> list[bytes]:
        """Return the bytes that each rank gave, in the order of ranks."""


class _Alone:
    """The one process of a run: nothing is sent, and nothing is computed differently."""

    rank = 0
    count = 1

    def spread(self, forward: Forward, parameters: Sequence[nn.Parameter]) -> Forward:
        return forward

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def total(self, *values: float) -> tuple[float, ...]:
        return values

    def from_first(self, data: bytes) -> bytes:
        return data

    def gathered(self, data: bytes) -> list[bytes]:
        return [data]


ALONE: Ranks = _Alone()


def part_of(ranks: Ranks, whole: int) -> BatchPart:
    """Return the part of a batch that this rank learns from."""
    return BatchPart.of(whole, rank=ranks.rank, ranks=ranks.count)


def refuse_differences(ranks: Ranks, said: Mapping[str, object], *, what: str) -> None:
    """Refuse to go on if ranks were told different things, and name these things."""
    if ranks.count == 1:
        return
    first, *others = (json.loads(answer) for answer in ranks.gathered(_encoded(said)))
    for rank, one in enumerate(others, start=1):
        names = [name for name in {**first, **one} if first.get(name) != one.get(name)]
        if names:
            raise DneError(
                f"rank {rank} has other {what} than rank 0: "
                + ", ".join(
                    f"{name} {_brief(one, name)}, not {_brief(first, name)}" for name in names
                )
                + "; nothing was published"
            )


def _encoded(said: Mapping[str, object]) -> bytes:
    return json.dumps(said, default=str).encode()


def _brief(said: Mapping[str, object], name: str) -> str:
    value = said.get(name)
    return value[:8] if isinstance(value, str) and len(value) == 64 else str(value)
