"""Hold a job: send heartbeats, note its versions, check that it is still ours, and end it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from model_store.backends.base import Entry, Objects
from model_store.errors import ClaimLost, JobCancelled, RecordInvalid, StoreUnsupported
from model_store.layout import ITEM_ID, JOBS
from model_store.records.jobs import (
    MAX_LOG_LINE,
    MAX_LOG_LINES,
    EndRecord,
    HeartbeatRecord,
    JobOutcome,
    MadeRecord,
    MadeVersion,
)
from model_store.records.sealing import (
    Record,
    create_record,
    make_record,
    read_record,
)
from model_store.records.signing import NO_KEYS, Keys

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


MAX_REASON = 2000
log = logging.getLogger("model_store.loop")
T = TypeVar("T", bound=Record)


class JobClaim:
    """The claim of one worker on one job. Claim 0 belongs to no worker. Not thread-safe."""

    def __init__(self, objects: Objects, *, job: str, number: int, keys: Keys = NO_KEYS) -> None:
        self.objects = objects
        self._keys = keys
        self.job = job
        self.number = number
        self._heartbeat = 0

    def check(self) -> None:
        """Raise ClaimLost if the job has ended or another worker has taken it, and JobCancelled if
        somebody has cancelled it."""
        state = self._state()
        if state is None or state.claim != self.number or state.has_ended:
            raise ClaimLost(self.job)
        if state.is_cancelled:
            raise JobCancelled(self.job)

    def heartbeat(
        self,
        phase: str,
        *,
        share: float | None = None,
        seconds_left: float | None = None,
        log: Sequence[str] = (),
    ) -> None:
        """Record that the worker is alive, and its progress. Keep the newest two heartbeats."""
        number = self._heartbeat + 1
        record = make_record(
            HeartbeatRecord,
            job=self.job,
            claim=self.number,
            number=number,
            phase=phase,
            share=share,
            seconds_left=seconds_left,
            log=clipped(log),
        )
        create_record(self.objects, heartbeat_name(self.job, self.number, number), record)
        self._heartbeat = number
        if number > 2:
            self.objects.delete(heartbeat_name(self.job, self.number, number - 2))

    def versions(self) -> list[int]:
        """List the versions that workers of this job have published. Where trust is required, skip
        notes without a trusted signature: the next worker promotes the versions of this list."""
        state = self._state()
        return [version for version in state.versions if self._is_trusted(version)] if state else []

    def _is_trusted(self, version: int) -> bool:
        if self._keys.trust is None:
            return True
        name = made_name(self.job, version)
        try:
            note = self._keys.check(read_record(self.objects, name, MadeRecord), name=name)
        except (RecordInvalid, StoreUnsupported) as error:
            log.warning("job %s: the note on version %s is refused: %s", self.job, version, error)
            return False
        return (note.job, note.version) == (self.job, version)

    def made(self, version: int) -> None:
        """Note that the job has published a version."""
        record = make_record(MadeRecord, job=self.job, claim=self.number, version=version)
        create_record(self.objects, made_name(self.job, version), self._keys.signed(record))

    def end(
        self,
        outcome: JobOutcome,
        *,
        reason: str,
        versions: Sequence[MadeVersion],
        log: Sequence[str] = (),
    ) -> bool:
        """End the job and delete its heartbeats and doubts. Return False if it has ended before."""
        record = make_record(
            EndRecord,
            job=self.job,
            claim=self.number,
            outcome=outcome,
            reason=reason[:MAX_REASON],
            versions=tuple(versions),
            log=clipped(log),
        )
        is_ours = create_record(self.objects, end_name(self.job), record)
        state = self._state()
        for name in (*state.heartbeats, *state.doubts) if state else ():
            self.objects.delete(name)
        return is_ours

    def _state(self) -> JobState | None:
        return job_states(self.objects.list(f"{JOBS}/{self.job}")).get(self.job)


def clipped(log: Sequence[str]) -> tuple[str, ...]:
    """Keep the end of a log, and the beginning of each line."""
    return tuple(line[:MAX_LOG_LINE] for line in log[-MAX_LOG_LINES:])
