"""Build and parse the names of a job's objects, and sum up its state from a listing of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from model_store.backends.base import Entry
from model_store.layout import ITEM_ID, JOBS

_NAME = re.compile(
    rf"{JOBS}/({ITEM_ID})/(job|cancel|end|claim\.([0-9]{{8}})|beat\.([0-9]{{8}})\.([0-9]{{8}})"
    r"|version\.([0-9]{8})|doubt\.([0-9]{8})\.([0-9]{8})\.[0-9a-f]{32})\.json"
)
_TURN = re.compile(rf"{JOBS}/turns/([a-z0-9][a-z0-9_-]{{0,62}})\.([0-9]{{8}})\.json")


@dataclass(slots=True, kw_only=True)
class JobState:
    """The facts about a job that the names of its objects give."""

    id: str
    is_whole: bool = False
    """True if the job's own record exists."""
    claim: int = 0
    """The newest claim; 0 for none."""
    heartbeat: int = 0
    """The newest heartbeat of that claim; 0 for none."""
    heartbeats: list[str] = field(default_factory=list)
    """The names of all heartbeats."""
    doubts: list[str] = field(default_factory=list)
    """The names of all doubts."""
    doubted_s: list[float] = field(default_factory=list)
    """The times of the doubts about the newest sign of life."""
    versions: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    has_ended: bool = False
    seen_s: float = 0.0
    """The time of the newest heartbeat, or of the claim without one, by the backend's clock."""


def job_name(job: str) -> str:
    return f"{JOBS}/{job}/job.json"


def cancel_name(job: str) -> str:
    return f"{JOBS}/{job}/cancel.json"


def end_name(job: str) -> str:
    return f"{JOBS}/{job}/end.json"


def claim_name(job: str, number: int) -> str:
    return f"{JOBS}/{job}/claim.{number:08d}.json"


def heartbeat_name(job: str, claim: int, number: int) -> str:
    return f"{JOBS}/{job}/beat.{claim:08d}.{number:08d}.json"


def doubt_name(job: str, claim: int, heartbeat: int, *, transaction: str) -> str:
    return f"{JOBS}/{job}/doubt.{claim:08d}.{heartbeat:08d}.{transaction}.json"


def turn_name(channel: str, number: int) -> str:
    return f"{JOBS}/turns/{channel}.{number:08d}.json"


def turn_of(name: str) -> tuple[str, int] | None:
    """Return channel and number in the name of a turn; None for any other name."""
    match = _TURN.fullmatch(name)
    return (match[1], int(match[2])) if match and int(match[2]) else None


def made_name(job: str, version: int) -> str:
    return f"{JOBS}/{job}/version.{version:08d}.json"


def job_states(entries: Iterable[Entry]) -> dict[str, JobState]:
    """Sum up a listing of jobs, by id, the newest job first."""
    states: dict[str, JobState] = {}
    for entry in sorted(entries, key=lambda entry: entry.name):
        match = _NAME.fullmatch(entry.name)
        if match is not None:
            state = states.setdefault(match[1], JobState(id=match[1]))
            _note(state, entry, match)
    return {job: states[job] for job in sorted(states, reverse=True)}


def _note(state: JobState, entry: Entry, match: re.Match[str]) -> None:
    kind = match[2]
    if kind in ("job", "cancel", "end"):
        state.is_whole |= kind == "job"
        state.is_cancelled |= kind == "cancel"
        state.has_ended |= kind == "end"
    elif match[3]:
        _note_sign(state, entry, claim=int(match[3]), heartbeat=0)
    elif match[4]:
        state.heartbeats.append(entry.name)
        _note_sign(state, entry, claim=int(match[4]), heartbeat=int(match[5]))
    elif match[6]:
        if int(match[6]):
            state.versions.append(int(match[6]))
    else:  # names of doubts sort after those of claims and heartbeats
        state.doubts.append(entry.name)
        if (int(match[7]), int(match[8])) == (state.claim, state.heartbeat):
            state.doubted_s.append(entry.modified_s)


def _note_sign(state: JobState, entry: Entry, *, claim: int, heartbeat: int) -> None:
    """Note a sign of life. The highest number is the newest: dates may be wrong."""
    if (claim, heartbeat) >= (state.claim, state.heartbeat):
        state.claim, state.heartbeat, state.seen_s = claim, heartbeat, entry.modified_s
