"""Build and parse the names of a job's objects."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from model_store.backends.base import Entry
from model_store.layout import ITEM_ID, JOBS

_NAME = re.compile(
    rf"{JOBS}/({ITEM_ID})/(job|cancel|end|claim\.([0-9]{{8}})|beat\.([0-9]{{8}})\.([0-9]{{8}})"
    r"|version\.([0-9]{8}))\.json"
)


@dataclass(slots=True, kw_only=True)
class Standing:
    """The facts about a job that a listing of its names tells."""

    id: str
    is_whole: bool = False
    """The job's own record is there."""
    claim: int = 0
    """The newest claim; 0 for none."""
    beat: int = 0
    """The newest beat of that claim; 0 for none."""
    beats: list[str] = field(default_factory=list)
    """The names of all beats."""
    versions: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    has_ended: bool = False
    seen_s: float = 0.0
    """The time of the newest sign of life, by the clock of the backend."""


def job_name(job: str) -> str:
    return f"{JOBS}/{job}/job.json"


def cancel_name(job: str) -> str:
    return f"{JOBS}/{job}/cancel.json"


def end_name(job: str) -> str:
    return f"{JOBS}/{job}/end.json"


def claim_name(job: str, number: int) -> str:
    return f"{JOBS}/{job}/claim.{number:08d}.json"


def beat_name(job: str, claim: int, number: int) -> str:
    return f"{JOBS}/{job}/beat.{claim:08d}.{number:08d}.json"


def made_name(job: str, version: int) -> str:
    return f"{JOBS}/{job}/version.{version:08d}.json"


def standings(entries: Iterable[Entry]) -> dict[str, Standing]:
    """Sum up a listing of jobs, by id, the newest job first."""
    found: dict[str, Standing] = {}
    for entry in sorted(entries, key=lambda one: one.name):
        match = _NAME.fullmatch(entry.name)
        if match is not None:
            standing = found.setdefault(match[1], Standing(id=match[1]))
            _note(standing, entry, match)
    return {job: found[job] for job in sorted(found, reverse=True)}


def _note(standing: Standing, entry: Entry, match: re.Match[str]) -> None:
    what = match[2]
    if what in ("job", "cancel", "end"):
        standing.is_whole |= what == "job"
        standing.is_cancelled |= what == "cancel"
        standing.has_ended |= what == "end"
    elif match[3]:
        _note_claim(standing, int(match[3]), entry)
    elif match[4]:
        standing.beats.append(entry.name)
        _note_claim(standing, int(match[4]), entry)
        if int(match[4]) == standing.claim:
            standing.beat = max(standing.beat, int(match[5]))
    elif int(match[6]):
        standing.versions.append(int(match[6]))


def _note_claim(standing: Standing, number: int, entry: Entry) -> None:
    if number > standing.claim:
        standing.claim, standing.beat, standing.seen_s = number, 0, entry.modified_s
    elif number == standing.claim:
        standing.seen_s = max(standing.seen_s, entry.modified_s)
