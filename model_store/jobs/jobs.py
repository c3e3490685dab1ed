"""Ask for jobs, read them and cancel them; workers claim them, one worker a job.

Create-if-absent decides everything: who has claim *n*, and how a job ended. The clock of the
backend decides whether a worker is dead, so clocks of machines may differ.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from model_store import __version__
from model_store.backends.base import ObjectMissing, Objects
from model_store.errors import JobNotFound, JobUnderWay, RecordInvalid, StoreUnsupported
from model_store.inbox.naming import is_id, new_id
from model_store.jobs.claim import Claim
from model_store.jobs.naming import (
    Standing,
    beat_name,
    cancel_name,
    claim_name,
    end_name,
    job_name,
    standings,
)
from model_store.layout import JOBS
from model_store.records.gc_marks import clock_s
from model_store.records.jobs import (
    BeatRecord,
    CancelRecord,
    ClaimRecord,
    EndRecord,
    JobRecord,
)
from model_store.records.sealing import (
    create_record,
    find_record,
    read_record,
    refusing_bad_fields,
    timestamp,
)

LEASE_S = 20.0
"""A worker that has not beaten for so long is dead, and another one may take its job."""
MAX_CLAIMS = 3
"""A job that so many workers died of is not tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job with its newest records."""

    record: JobRecord
    standing: Standing
    claim: ClaimRecord | None
    beat: BeatRecord | None
    end: EndRecord | None


class Jobs:
    """The jobs of one store. Safe to use from several threads, as its objects are."""

    def __init__(
        self, objects: Objects, *, store_clock: Callable[[Objects], float] = clock_s
    ) -> None:
        self.objects = objects
        self._store_clock = store_clock

    def ask(self, *, channel: str, actor: str, reason: str) -> JobRecord:
        """Ask for learning. Raise JobUnderWay where a job of the channel has not ended."""
        for standing in self.standings().values():
            if not standing.has_ended and self._is_of(standing, channel):
                raise JobUnderWay(standing.id)
        with refusing_bad_fields():
            record = JobRecord(
                id=new_id(),
                kind="learn-from-inbox",
                channel=channel,
                reason=reason,
                actor=actor,
                time=timestamp(),
                transaction=uuid.uuid4().hex,
            )
        create_record(self.objects, job_name(record.id), record)
        return record

    def standings(self) -> dict[str, Standing]:
        """Sum up all jobs, the newest first, from one listing."""
        return {job: one for job, one in standings(self.objects.list(JOBS)).items() if one.is_whole}

    def of_channel(self, channel: str, *, limit: int) -> Iterator[str]:
        """List the ids of a channel's jobs, the newest first."""
        found = (one.id for one in self.standings().values() if self._is_of(one, channel))
        yield from islice(found, limit)

    def standing(self, job: str) -> Standing:
        if not is_id(job):
            raise JobNotFound(job[:40])
        found = standings(self.objects.list(f"{JOBS}/{job}")).get(job)
        if found is None or not found.is_whole:
            raise JobNotFound(job)
        return found

    def job(self, job: str) -> Job:
        """Read a job. Raise JobNotFound where there is none."""
        standing = self.standing(job)
        try:
            record = read_record(self.objects, job_name(job), JobRecord)
        except ObjectMissing as error:
            raise JobNotFound(job) from error
        claim = beat = None
        if standing.claim:
            claim = find_record(self.objects, claim_name(job, standing.claim), ClaimRecord)
        if standing.beat:
            name = beat_name(job, standing.claim, standing.beat)
            beat = find_record(self.objects, name, BeatRecord)
        end = find_record(self.objects, end_name(job), EndRecord) if standing.has_ended else None
        return Job(record=record, standing=standing, claim=claim, beat=beat, end=end)

    def cancel(self, job: str, *, actor: str) -> None:
        """Cancel a job. One that no living worker has ends at once; a worker ends its own."""
        standing = self.standing(job)
        with refusing_bad_fields():
            record = CancelRecord(
                job=job, actor=actor, time=timestamp(), transaction=uuid.uuid4().hex
            )
        create_record(self.objects, cancel_name(job), record)
        if not standing.has_ended and (not standing.claim or self.is_dead(standing)):
            claim = Claim(self.objects, job=job, number=standing.claim)
            claim.end("cancelled", reason="", versions=())

    def is_dead(self, standing: Standing) -> bool:
        """Tell whether the worker of a job gives no sign of life any more."""
        alive_s = self._store_clock(self.objects) - standing.seen_s
        return standing.claim > 0 and alive_s > LEASE_S

    def claim_next(self, *, channel: str, worker: str) -> Claim | None:
        """Take the oldest job of a channel that nobody works on; None where there is none."""
        for standing in reversed(self.standings().values()):
            if standing.has_ended or not self._is_of(standing, channel):
                continue
            claim = self._claim(standing, worker=worker)
            if claim is not None:
                return claim
        return None

    def _claim(self, standing: Standing, *, worker: str) -> Claim | None:
        job, number = standing.id, standing.claim + 1
        if standing.claim and not self.is_dead(standing):
            return None
        if number > MAX_CLAIMS:
            reason = f"{MAX_CLAIMS} workers died of it; their logs tell why"
            Claim(self.objects, job=job, number=standing.claim).end(
                "failed", reason=reason, versions=()
            )
            return None
        with refusing_bad_fields():
            record = ClaimRecord(
                job=job,
                number=number,
                worker=worker,
                software=f"dne-serve {__version__}",
                time=timestamp(),
                transaction=uuid.uuid4().hex,
            )
        if not create_record(self.objects, claim_name(job, number), record):
            return None  # another worker was faster
        return Claim(self.objects, job=job, number=number)

    def _is_of(self, standing: Standing, channel: str) -> bool:
        """Tell whether a job is one of a channel. One that this software cannot read is left to
        others."""
        try:
            record = find_record(self.objects, job_name(standing.id), JobRecord)
        except (RecordInvalid, StoreUnsupported):
            return False
        return record is not None and record.channel == channel
