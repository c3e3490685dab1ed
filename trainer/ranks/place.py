"""Read a process's place in a run from the environment, as `torchrun` and `--processes` set it.

Import no torch: the command that starts the processes does not need it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model_store.errors import WrongUsage

MEETING = "RANKS_MEET_IN"
"""The file in which processes of one machine find each other; `torchrun` has an address instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
        meeting = {} if self.meeting is None else {MEETING: str(self.meeting)}
        return {name: str(value) for name, value in said.items()} | meeting


def place_of(environment: Mapping[str, str] | None = None) -> Place | None:
    """Read the place of this process; None if it learns alone."""
    said = os.environ if environment is None else environment
    if said.get("WORLD_SIZE", "1") == "1":
        return None
    rank, ranks = _number(said, "RANK"), _number(said, "WORLD_SIZE")
    if rank >= ranks:
        raise WrongUsage(f"RANK is {rank}, and WORLD_SIZE {ranks}: start the run with torchrun")
    meeting = said.get(MEETING)
    return Place(
        rank=rank,
        ranks=ranks,
        local_rank=_number(said, "LOCAL_RANK", default="0"),
        local_ranks=max(1, _number(said, "LOCAL_WORLD_SIZE", default="1")),
        meeting=Path(meeting) if meeting else None,
    )


def cores_here() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
            f"{name} is {value!r}, which is no number, and WORLD_SIZE is {said.get('WORLD_SIZE')!r}"
            ": start the run with torchrun, or unset WORLD_SIZE"
        )
    return int(value)
