"""Join the processes of a run by torch.distributed: gloo between CPUs, NCCL between GPUs.

Exchange bytes and tensors only. torch's functions for objects are not used: they are pickles.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model_store.errors import DneError, WrongUsage
from trainer.ranks.launch import EXIT_LOST, GRACE_S, RankPlace
from trainer.ranks.ranks import Forward, LossAndRight, RankLost, Ranks


class Interrupts:
    """Requests to end this process.

    Python drops an exception that is raised while it destroys an object. So a request is kept, and
    heeded at the next exchange with other ranks.
    """

    def __init__(self) -> None:
        self._asked = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal as Ctrl-C is handled."""
        self._asked = True
        raise KeyboardInterrupt

    def heed(self) -> None:
        """Raise KeyboardInterrupt if there was a request."""
        if self._asked:
            raise KeyboardInterrupt


_JOINING = timedelta(minutes=5)
WAITING = timedelta(hours=2)
"""The longest wait for a rank: the first one judges and fits alone while the others wait."""


@contextmanager
def joined(place: RankPlace, interrupts: Interrupts, *, on_gpu: bool) -> Iterator[Group]:
    """Meet the other processes of the run, and part from them at the end."""
    if on_gpu:
        torch.cuda.set_device(place.local_rank)
    meeting = "env://" if place.meeting is None else f"file://{place.meeting}"
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    try:
        dist.init_process_group(
            backend,
            init_method=meeting,
            rank=place.rank,
            world_size=place.ranks,
            timeout=_JOINING,
        )
        members: Any = dist.new_group(timeout=WAITING, backend=backend)
    except (RuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise DneError(f"the processes of the run did not find each other: {first}") from error
    yield Group(members, interrupts, rank=place.rank, count=place.ranks)
    # Not after a fault: others may be gone, and the end of the process closes all connections.
    dist.destroy_process_group()


class Group:
    """The ranks of a run, joined."""

    def __init__(self, members: Any, interrupts: Interrupts, *, rank: int, count: int) -> None:
        self.rank, self.count, self._members, self._interrupts = rank, count, members, interrupts

    def spread(self, forward: Forward, parameters: Sequence[nn.Parameter]) -> Forward:
        module = DistributedDataParallel(_Forward(forward, parameters), process_group=self._members)
        return cast(Forward, module)

    def total(self, *values: float) -> tuple[float, ...]:
        sums = torch.tensor(values, dtype=torch.float64)
        with self.watched():
            dist.all_reduce(sums, group=self._members)
        return tuple(sums.tolist())

    def from_first(self, data: bytes) -> bytes:
        size = torch.tensor([len(data)])
        with self.watched():
            dist.broadcast(size, src=0, group=self._members)
            sent = torch.zeros(int(size), dtype=torch.uint8)
            if self.rank == 0:
                sent = _bytes_of(data)
            if len(sent):
                dist.broadcast(sent, src=0, group=self._members)
        return sent.numpy().tobytes()

    def gathered(self, data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        with self.watched():
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self._members)
            # Ranks send equally many bytes, so the shorter ones are padded; never none at all.
            padded = torch.zeros(1 + max(map(int, sizes)), dtype=torch.uint8)
            padded[: len(data)] = _bytes_of(data)
            parts = [torch.zeros_like(padded) for _ in sizes]
            dist.all_gather(parts, padded, group=self._members)
        return [one[: int(size)].numpy().tobytes() for one, size in zip(parts, sizes, strict=True)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._interrupts.heed()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo/" in str(error):
                raise RankLost("another process of the run has ended") from error
            raise


class _Forward(nn.Module):
    """The loss as a module that has exactly the parameters that learn."""

    def __init__(self, forward: Forward, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.learnt = nn.ParameterList(parameters)
        self._forward = forward

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> LossAndRight:
        return self._forward(images_BCHW, labels_B)


def _bytes_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data or b"0"), dtype=torch.uint8)[: len(data)]


_STDIN = 0


@contextmanager
def taking_part(place: RankPlace, *, on_gpu: bool) -> Iterator[Ranks]:
    """Join the other ranks. SIGTERM acts as Ctrl-C does; errors name the rank."""
    interrupts = Interrupts()
    signal.signal(signal.SIGTERM, interrupts.ask)
    if place.meeting is not None:
        threading.Thread(target=_end_with_stdin, name="ends with the run", daemon=True).start()
    try:
        with joined(place, interrupts, on_gpu=on_gpu) as ranks:
            yield ranks
    except RankLost as error:
        print(f"error: {_by(place)}{error}", file=sys.stderr)
        raise SystemExit(EXIT_LOST) from error
    except WrongUsage as error:
        raise WrongUsage(f"{_by(place)}{error}") from error
    except DneError as error:
        raise DneError(f"{_by(place)}{error}") from error


def _by(place: RankPlace) -> str:
    """Name the rank under torchrun; a command that starts the ranks itself does so."""
    return f"rank {place.rank}: " if place.rank and place.meeting is None else ""


def _end_with_stdin() -> None:
    """End this process when the command that has started it is gone, however that came about."""
    while os.read(_STDIN, 1):  # nothing is ever written
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)  # it waits for a rank, where no signal reaches it
