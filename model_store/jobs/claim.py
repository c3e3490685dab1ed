"""Hold a job: beat, note its versions, look whether it is still ours, and end it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TypeVar

from model_store.backends.base import Objects
from model_store.errors import ClaimLost, JobCancelled
from model_store.jobs.naming import beat_name, end_name, made_name, standings
from model_store.layout import JOBS
from model_store.records.fields import Record
from model_store.records.jobs import (
    MAX_LOG_LINE,
    MAX_LOG_LINES,
    BeatRecord,
    EndRecord,
    MadeRecord,
    MadeVersion,
    Outcome,
)
from model_store.records.sealing import create_record, refusing_bad_fields, timestamp

MAX_REASON = 2000
T = TypeVar("T", bound=Record)


class Claim:
    """The claim of one worker on one job. Claim 0 is nobody's. For one thread at a time."""

    def __init__(self, objects: Objects, *, job: str, number: int) -> None:
        self.objects = objects
        self.job = job
        self.number = number
        self._beat = 0

    def check(self) -> None:
        """Raise ClaimLost where the job has ended or is another worker's now, JobCancelled where
        somebody has cancelled it."""
        found = standings(self.objects.list(f"{JOBS}/{self.job}")).get(self.job)
        if found is None or found.claim != self.number or found.has_ended:
            raise ClaimLost(self.job)
        if found.is_cancelled:
            raise JobCancelled(self.job)

    def beat(
        self,
        phase: str,
        *,
        share: float | None = None,
        seconds_left: float | None = None,
        log: Sequence[str] = (),
    ) -> None:
        """Show that the worker lives, and how far it has come. Older beats but one are deleted."""
        number = self._beat + 1
        record = self._record(
            BeatRecord,
            claim=self.number,
            number=number,
            phase=phase,
            share=share,
            seconds_left=seconds_left,
            log=clipped(log),
        )
        create_record(self.objects, beat_name(self.job, self.number, number), record)
        self._beat = number
        if number > 2:
            self.objects.delete(beat_name(self.job, self.number, number - 2))

    def versions(self) -> list[int]:
        """List the versions that workers of this job have published."""
        found = standings(self.objects.list(f"{JOBS}/{self.job}")).get(self.job)
        return found.versions if found else []

    def made(self, version: int) -> None:
        """Note that the job has published a version."""
        record = self._record(MadeRecord, claim=self.number, version=version)
        create_record(self.objects, made_name(self.job, version), record)

    def end(
        self,
        outcome: Outcome,
        *,
        reason: str,
        versions: Sequence[MadeVersion],
        log: Sequence[str] = (),
    ) -> bool:
        """End the job, and delete its beats. Return False where it had ended already."""
        record = self._record(
            EndRecord,
            claim=self.number,
            outcome=outcome,
            reason=reason[:MAX_REASON],
            versions=tuple(versions),
            log=clipped(log),
        )
        is_ours = create_record(self.objects, end_name(self.job), record)
        found = standings(self.objects.list(f"{JOBS}/{self.job}")).get(self.job)
        for name in found.beats if found else ():
            self.objects.delete(name)
        return is_ours

    def _record(self, kind: type[T], **fields: object) -> T:
        every = {"job": self.job, "time": timestamp(), "transaction": uuid.uuid4().hex}
        with refusing_bad_fields():
            return kind.model_validate({**every, **fields})


def clipped(log: Sequence[str]) -> tuple[str, ...]:
    """Keep the end of a log, and the beginning of each line."""
    return tuple(line[:MAX_LOG_LINE] for line in log[-MAX_LOG_LINES:])
