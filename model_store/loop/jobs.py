"""Ask for jobs, read them, cancel them, and claim them for a worker, one worker a job.

Create-if-absent decides who may ask for a job, who holds claim *n*, and how a job ended. The clock
of the backend decides whether a worker is dead, so the clocks of machines may differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from typing import TypeVar

from model_store import __version__
from model_store.backends.base import Entry, Objects, keyed
from model_store.errors import JobNotFound, JobUnderWay, RecordInvalid, StoreUnsupported
from model_store.layout import JOBS
from model_store.loop.claim import (
    JobClaim,
    JobState,
    cancel_name,
    claim_name,
    doubt_name,
    end_name,
    heartbeat_name,
    job_name,
    job_states,
    turn_name,
    turn_of,
)
from model_store.loop.item_names import is_id, new_id
from model_store.records.gc_marks import clock_s
from model_store.records.jobs import (
    CancelRecord,
    ClaimRecord,
    DoubtRecord,
    EndRecord,
    HeartbeatRecord,
    JobKind,
    JobRecord,
    TurnRecord,
)
from model_store.records.sealing import (
    Record,
    create_record,
    find_record,
    make_record,
    read_record,
)
from model_store.records.signing import NO_KEYS, Keys

LEASE_S = 20.0
"""A worker without a heartbeat for this long counts as dead, and another one may take its job."""
MAX_CLAIMS = 3
"""A job is not tried again once this many workers have claimed it and died."""

log = logging.getLogger("model_store.loop")
T = TypeVar("T", bound=Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job with its newest records."""

    record: JobRecord
    state: JobState
    claim: ClaimRecord | None
    heartbeat: HeartbeatRecord | None
    end: EndRecord | None


class Jobs:
    """The jobs of one store. Safe to use from several threads, as its objects are."""

    def __init__(
        self,
        objects: Objects,
        *,
        keys: Keys = NO_KEYS,
        store_clock: Callable[[Objects], float] = clock_s,
    ) -> None:
        """With the store's `keys`, sign jobs, and read only trusted ones."""
        self.objects = objects
        self._keys = keys
        self._store_clock = store_clock

    def ask(
        self,
        *,
        channel: str,
        actor: str,
        reason: str,
        kind: JobKind = "learn-from-inbox",
        pretrained: str | None = None,
    ) -> JobRecord:
        """Ask for learning. Raise JobUnderWay if a job of the channel has not ended. `pretrained`
        names the weights that a first task begins with."""
        entries = self.objects.list(JOBS)
        for state in _whole(entries).values():
            if not state.has_ended and self._is_of(state, channel):
                raise JobUnderWay(state.id)
        number = self._next_turn(entries, channel)
        record = make_record(
            JobRecord,
            id=new_id(),
            kind=kind,
            channel=channel,
            reason=reason,
            pretrained=pretrained,
            actor=actor,
        )
        record = self._keys.signed(record)
        turn = TurnRecord(
            channel=channel,
            number=number,
            job=record.id,
            time=record.time,
            transaction=record.transaction,
        )
        name = turn_name(channel, number)
        if not create_record(self.objects, name, turn):
            raise JobUnderWay(read_record(self.objects, name, TurnRecord).job)
        create_record(self.objects, job_name(record.id), record)
        return record

    def _next_turn(self, entries: Sequence[Entry], channel: str) -> int:
        """Return the first free turn after the newest one that has a job. Raise JobUnderWay if the
        turn before it was taken a moment ago and its job is about to be written. Other turns have
        no job: their owners died, or they are forged."""
        turns = {
            key[1]: entry for key, entry in keyed(entries, turn_of).items() if key[0] == channel
        }
        jobs = _whole(entries)
        newest_first = sorted(turns, reverse=True)
        last = next((turn for turn in newest_first if self._job_of(channel, turn) in jobs), 0)
        free = next(number for number in count(last + 1) if number not in turns)
        taken = self._job_of(channel, free - 1) if free - 1 > last else None
        if taken is not None:
            age_s = self._store_clock(self.objects) - turns[free - 1].modified_s
            if abs(age_s) <= LEASE_S:
                raise JobUnderWay(taken)
        return free

    def _job_of(self, channel: str, number: int) -> str | None:
        """Read the job of a turn; None if the turn cannot be read."""
        turn = self._readable(turn_name(channel, number), TurnRecord)
        return turn.job if turn else None

    def states(self) -> dict[str, JobState]:
        """Sum up all jobs, the newest first, from one listing."""
        return _whole(self.objects.list(JOBS))

    def of_channel(self, channel: str, *, limit: int) -> Iterator[Job]:
        """Read the newest jobs of a channel. Leave out jobs whose records cannot be trusted, and
        log a warning."""
        jobs = (state.id for state in self.states().values() if self._is_of(state, channel))
        for job in islice(jobs, limit):
            try:
                yield self.job(job)
            except (RecordInvalid, StoreUnsupported) as error:
                _warn_once(f"job {job} is not listed: {error}")

    def state(self, job: str) -> JobState:
        if not is_id(job):
            raise JobNotFound(job[:40])
        state = job_states(self.objects.list(f"{JOBS}/{job}")).get(job)
        if state is None or not state.is_whole:
            raise JobNotFound(job)
        return state

    def job(self, job: str) -> Job:
        """Read a job. Raise JobNotFound if there is none."""
        state = self.state(job)
        record = self._record(job)
        if record is None:
            raise JobNotFound(job)
        claim = heartbeat = None
        if state.claim:
            claim = self._readable(claim_name(job, state.claim), ClaimRecord)
        if state.heartbeat:
            name = heartbeat_name(job, state.claim, state.heartbeat)
            heartbeat = self._readable(name, HeartbeatRecord)
        end = find_record(self.objects, end_name(job), EndRecord) if state.has_ended else None
        return Job(record=record, state=state, claim=claim, heartbeat=heartbeat, end=end)

    def cancel(self, job: str, *, actor: str) -> None:
        """Cancel a job. End it at once unless a living worker holds it; that worker ends it."""
        state = self.state(job)
        record = make_record(CancelRecord, job=job, actor=actor)
        create_record(self.objects, cancel_name(job), record)
        if not state.has_ended and (not state.claim or self.is_dead(state)):
            claim = JobClaim(self.objects, job=job, number=state.claim)
            claim.end("cancelled", reason="", versions=())

    def is_dead(self, state: JobState) -> bool:
        """Return whether the worker of a job no longer gives a sign of life. A sign dated in the
        future has no age: its lease begins with the first doubt about it."""
        if not state.claim:
            return False
        now_s = self._store_clock(self.objects)
        age_s = now_s - state.seen_s
        if age_s >= -LEASE_S:
            return age_s > LEASE_S
        doubt_ages_s = [now_s - doubted_s for doubted_s in state.doubted_s if doubted_s <= now_s]
        if not doubt_ages_s:
            self._doubt(state)
        return max(doubt_ages_s, default=0.0) > LEASE_S

    def _doubt(self, state: JobState) -> None:
        record = make_record(DoubtRecord, job=state.id, claim=state.claim, beat=state.heartbeat)
        name = doubt_name(state.id, state.claim, state.heartbeat, transaction=record.transaction)
        create_record(self.objects, name, record)

    def claim_next(self, *, channel: str, worker: str) -> JobClaim | None:
        """Claim the oldest job of a channel without a living worker; None if there is none."""
        for state in reversed(self.states().values()):
            if state.has_ended or not self._is_of(state, channel):
                continue
            claim = self._claim(state, worker=worker)
            if claim is not None:
                return claim
        return None

    def _claim(self, state: JobState, *, worker: str) -> JobClaim | None:
        job, number = state.id, state.claim + 1
        if state.claim and not self.is_dead(state):
            return None
        if number > MAX_CLAIMS:
            reason = f"{MAX_CLAIMS} workers died during it; their logs say why"
            JobClaim(self.objects, job=job, number=state.claim).end(
                "failed", reason=reason, versions=()
            )
            return None
        record = make_record(
            ClaimRecord, job=job, number=number, worker=worker, software=f"dne-serve {__version__}"
        )
        if not create_record(self.objects, claim_name(job, number), record):
            return None  # another worker was faster
        return JobClaim(self.objects, job=job, number=number, keys=self._keys)

    def _is_of(self, state: JobState, channel: str) -> bool:
        """Return whether a job belongs to a channel. Leave to others a job that this software
        cannot read, or that lacks a required signature."""
        try:
            record = self._record(state.id)
        except (RecordInvalid, StoreUnsupported) as error:
            _warn_once(f"job {state.id} is skipped: {error}")
            return False
        return record is not None and record.channel == channel

    def _record(self, job: str) -> JobRecord | None:
        """Read the request of a job; None if there is none. Raise RecordInvalid if it names another
        job, and SignatureRefused if it lacks a required signature."""
        name = job_name(job)
        record = find_record(self.objects, name, JobRecord)
        if record is None:
            return None
        if record.id != job:
            raise RecordInvalid(name, f"it says it is job {record.id}")
        return self._keys.check(record, name=name)

    def _readable(self, name: str, kind: type[T]) -> T | None:
        """Read a record; return None if there is none, or if it cannot be trusted."""
        try:
            return find_record(self.objects, name, kind)
        except (RecordInvalid, StoreUnsupported) as error:
            _warn_once(f"a record of a job is skipped: {error}")
            return None


@lru_cache(maxsize=1000)
def _warn_once(text: str) -> None:
    """Log a warning, unless it was logged before: workers and pages poll every few seconds."""
    log.warning(text)


def _whole(entries: Sequence[Entry]) -> dict[str, JobState]:
    return {job: state for job, state in job_states(entries).items() if state.is_whole}
