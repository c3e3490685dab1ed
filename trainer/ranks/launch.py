"""Start the processes of `--processes N` on this machine, and end with what the first one says.

`torchrun` does the same for several machines. It is not used here because it knows no exit code
but 0 and 1, and its ranks meet at a port that is open to others. Import no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from model_store.cli.command import EXIT_FAILED, EXIT_NOT_PROMOTED, EXIT_OK
from model_store.errors import WrongUsage
from model_store.host.children import end_of, ending, last_words

_MEETING = "RANKS_MEET_IN"
"""The file in which processes of one machine find each other; `torchrun` has an address instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One process among those that learn a version together."""

    rank: int
    ranks: int
    local_rank: int
    """The number of the process on its machine: it takes the GPU of this number."""
    local_ranks: int
    meeting: Path | None = None
    """None: the ranks meet at an address, MASTER_ADDR and MASTER_PORT."""

    def variables(self) -> dict[str, str]:
        """Return the environment from which `place_of` reads this place."""
        said = {
            "RANK": self.rank,
            "WORLD_SIZE": self.ranks,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_ranks,
        }
        meeting = {} if self.meeting is None else {_MEETING: str(self.meeting)}
        return {name: str(value) for name, value in said.items()} | meeting


def place_of(environment: Mapping[str, str] | None = None) -> RankPlace | None:
    """Read the place of this process; None if it learns alone."""
    said = os.environ if environment is None else environment
    if said.get("WORLD_SIZE", "1") == "1":
        return None
    rank, ranks = _number(said, "RANK"), _number(said, "WORLD_SIZE")
    if rank >= ranks:
        raise WrongUsage(f"RANK is {rank}, and WORLD_SIZE {ranks}: start the run with torchrun")
    meeting = said.get(_MEETING)
    return RankPlace(
        rank=rank,
        ranks=ranks,
        local_rank=_number(said, "LOCAL_RANK", default="0"),
        local_ranks=max(1, _number(said, "LOCAL_WORLD_SIZE", default="1")),
        meeting=Path(meeting) if meeting else None,
    )


def refuse_ranks(command: str) -> None:
    """Refuse to run a command in several processes that would all do the same."""
    if place_of() is not None:
        raise WrongUsage(
            f"{command} runs in one process: start it without torchrun; add-task and deepen can "
            "use several"
        )


def _number(said: Mapping[str, str], name: str, *, default: str = "") -> int:
    value = said.get(name, default)
    if not (value.isascii() and value.isdigit() and len(value) <= 6):
        raise WrongUsage(
            f"{name} is {value!r}, which is not a number, and WORLD_SIZE is "
            f"{said.get('WORLD_SIZE')!r}: start the run with torchrun, or unset WORLD_SIZE"
        )
    return int(value)


_MOST_PROCESSES = 1024
EXIT_LOST = 4
"""A rank ended because another one had ended. Only the command that started the ranks sees it."""
POLL_S = 0.05
GRACE_S = 10.0
"""The time in which a rank can end by itself, after another one or after SIGTERM."""


@dataclass(frozen=True, slots=True)
class Started:
    """A process of the run."""

    rank: int
    process: subprocess.Popen[bytes]
    said: Path
    """The stderr of the process. The first one has no such file: it speaks for all."""

    @property
    def code(self) -> int | None:
        return self.process.poll()


PROGRAM = ("-m", "trainer")


def launch(arguments: Sequence[str], *, processes: int, program: Sequence[str] = PROGRAM) -> int:
    """Run `dne-train` with these arguments in so many processes. Return the exit code of all."""
    with tempfile.TemporaryDirectory(prefix="dne-ranks-") as folder, _sigterm_interrupts():
        started = [
            _start([*program, *arguments], Path(folder), rank=rank, ranks=processes)
            for rank in range(processes)
        ]
        try:
            codes: list[int | None] = [None]
            while None in codes and not any(codes):
                time.sleep(POLL_S)
                codes = [member.code for member in started]
            _wait(started, seconds=GRACE_S)
            ended = [member for member in started if member.code is not None]
        except KeyboardInterrupt:
            ended = []  # the first rank says how far the run has come
        finally:
            _end(started)
        return _verdict(started[0], ended)


def refuse_processes(processes: int, place: RankPlace | None) -> None:
    """Refuse numbers that make no sense."""
    if not 1 <= processes <= _MOST_PROCESSES:
        raise WrongUsage(f"`processes` must be between 1 and {_MOST_PROCESSES}, not {processes}")
    if place is not None and place.ranks != processes:
        raise WrongUsage(
            f"`processes={processes}` does not fit: torchrun has started {place.ranks}; leave "
            "`processes` out"
        )


def _start(command: Sequence[str], folder: Path, *, rank: int, ranks: int) -> Started:
    place = RankPlace(
        rank=rank, ranks=ranks, local_rank=rank, local_ranks=ranks, meeting=folder / "meeting"
    )
    # The same code in the same order as here, and nothing from the folder that the user is in.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= place.variables()
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    said = folder / f"rank-{rank}"
    with said.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", *command],
            env=environment,
            stdin=subprocess.PIPE,  # a rank ends when its stdin does, so none outlives this command
            stdout=None if rank == 0 else errors,
            stderr=None if rank == 0 else errors,
            start_new_session=True,  # Ctrl-C comes here only, and is handed on once
        )
    return Started(rank, process, said)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(started: Sequence[Started], *, seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while any(member.code is None for member in started) and time.monotonic() < give_up:
        time.sleep(POLL_S)


def _end(started: Sequence[Started]) -> None:
    """Ask processes that run to end, and end those that do not."""
    for member in started:
        if member.code is None:
            member.process.terminate()
    _wait(started, seconds=GRACE_S)
    for member in started:
        if member.code is None:
            member.process.kill()
        member.process.wait()
        assert member.process.stdin is not None
        member.process.stdin.close()


def _verdict(first: Started, ended: Sequence[Started]) -> int:
    """Return the exit code of the run, and say whose fault it was unless the first rank has."""
    code = first.process.returncode
    if code in (EXIT_OK, EXIT_NOT_PROMOTED):
        return code
    faulty = [member for member in ended if member.code not in (EXIT_OK, EXIT_LOST)]
    if first in faulty and code > 0:
        return code
    for one in faulty:
        print(f"error: rank {one.rank} {_how_it_ended(one)}", file=sys.stderr)
    return next((one.code for one in faulty if one.code and one.code > 0), EXIT_FAILED)


def _how_it_ended(one: Started) -> str:
    code = one.process.returncode
    reason = last_words(end_of(one.said)).removeprefix("error: ")
    told = f"{ending(code)}: {reason}" if reason else ending(code)
    return f"{told}; the same command goes on" if code < 0 else told
