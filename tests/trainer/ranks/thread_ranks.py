"""Ranks that are threads of this process, for tests: no start of processes, and no network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from trainer.ranks.ranks import Forward, Ranks

Result = TypeVar("Result")
PATIENCE_S = 30.0


class Table:
    """A place where each rank puts something and takes what all have put."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._put: list[object] = [None] * count
        self._barrier = threading.Barrier(count)

    def exchange(self, rank: int, thing: Result) -> list[Result]:
        self._put[rank] = thing
        self._barrier.wait(PATIENCE_S)
        taken = list(self._put)
        self._barrier.wait(PATIENCE_S)
        return taken  # type: ignore[return-value]

    def leave(self) -> None:
        """Let the others fail at once if a rank has failed."""
        self._barrier.abort()


class ThreadRank:
    """One of the ranks."""

    def __init__(self, table: Table, *, rank: int) -> None:
        self.rank, self.count, self._table = rank, table.count, table

    def spread(self, forward: Forward, parameters: Sequence[nn.Parameter]) -> Forward:
        def average(parameter: Tensor) -> None:
            assert parameter.grad is not None
            grads = self._table.exchange(self.rank, parameter.grad.clone())
            parameter.grad = torch.stack(grads).mean(dim=0)

        for one in parameters:
            one.register_post_accumulate_grad_hook(average)
        return forward

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def total(self, *values: float) -> tuple[float, ...]:
        return tuple(map(sum, zip(*self._table.exchange(self.rank, values), strict=True)))

    def from_first(self, data: bytes) -> bytes:
        return self._table.exchange(self.rank, data)[0]

    def gathered(self, data: bytes) -> list[bytes]:
        return self._table.exchange(self.rank, data)


def together(count: int, work: Callable[[Ranks], Result]) -> list[Result]:
    """Do the same work in so many ranks at once. Return the result of each."""
    table = Table(count)

    def one(rank: int) -> Result:
        try:
            return work(ThreadRank(table, rank=rank))
        except BaseException:
            table.leave()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(one, rank) for rank in range(count)]
    faults = [fault for fault in (future.exception() for future in futures) if fault]
    named = [one for one in faults if not isinstance(one, threading.BrokenBarrierError)]
    for fault in [*named, *faults]:
        raise fault
    return [future.result() for future in futures]
