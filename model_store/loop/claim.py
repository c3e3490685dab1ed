"""Hold a job: send heartbeats, note its versions, check that it is still ours, and end it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import TypeVar

from model_store.backends.base import Objects
from model_store.errors import ClaimLost, JobCancelled, RecordInvalid, StoreUnsupported
from model_store.layout import JOBS
from model_store.loop.job_state import JobState, end_name, heartbeat_name, job_states, made_name
from model_store.records.fields import Record
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
    create_record,
    read_record,
    refusing_bad_fields,
    timestamp,
)
from model_store.records.signing import NO_KEYS, Keys

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
        record = self._record(
            HeartbeatRecord,
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
        record = self._record(MadeRecord, claim=self.number, version=version)
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
        record = self._record(
            EndRecord,
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

    def _record(self, kind: type[T], **fields: object) -> T:
        shared = {"job": self.job, "time": timestamp(), "transaction": uuid.uuid4().hex}
        with refusing_bad_fields():
            return kind.model_validate({**shared, **fields})


def clipped(log: Sequence[str]) -> tuple[str, ...]:
    """Keep the end of a log, and the beginning of each line."""
    return tuple(line[:MAX_LOG_LINE] for line in log[-MAX_LOG_LINES:])
