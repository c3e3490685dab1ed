"""Divide a batch among ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The images of a batch that one rank learns from: `start` to `stop` of `whole`.

    A rank without images takes the first one and gives it no weight, because all ranks must take
    part in every step.
    """

    start: int
    stop: int
    whole: int
    ranks: int

    @classmethod
    def of(cls, whole: int, *, rank: int = 0, ranks: int = 1) -> Part:
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
