"""Define the records of jobs: requests to learn, and what workers did about them.

Every record is created once and never changed. A worker holds a job by the newest claim, and shows
by heartbeats that it is alive.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from model_store.layout import ITEM_ID
from model_store.records.channel import ChannelName
from model_store.records.sealing import (
    FORMAT,
    LATER,
    Record,
    Share,
    SignedRecord,
    Text,
    Timestamp,
    Transaction,
    Version,
)

MAX_LOG_LINES = 30
MAX_LOG_LINE = 500

_JobId = Annotated[str, Field(pattern=f"^{ITEM_ID}$")]
Number = Annotated[int, Field(ge=1, le=99_999_999)]
Log = Annotated[
    tuple[Annotated[str, Field(max_length=MAX_LOG_LINE)], ...], Field(max_length=MAX_LOG_LINES)
]
"""The last lines that a run has logged."""
JobKind = Literal["learn-from-inbox", "grow"]
"""`learn-from-inbox`: learn from the labels that wait. `grow`: adapt the version that the channel
names, by the images that the store keeps."""
BackboneName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?$")
]
"""The name of a known backbone, or owner/name on the Hugging Face Hub; never a path."""
JobOutcome = Literal["promoted", "refused", "failed", "cancelled"]
"""`promoted`: the channel names all that was learnt. `refused`: a version was published and not
promoted. `failed`: an error ended the run. `cancelled`: somebody cancelled it."""


class JobRecord(SignedRecord):
    """`jobs/<id>/job.json`: somebody asks for a version."""

    signed_kind: ClassVar[str] = "job"
    format: Literal[1] = FORMAT
    id: _JobId
    kind: JobKind
    channel: ChannelName
    reason: Text
    pretrained: Annotated[BackboneName | None, LATER] = None
    """The weights that a first task begins with. Left out where there are none: older workers read
    such jobs."""
    actor: Text
    time: Timestamp
    transaction: Transaction


class ClaimRecord(Record):
    """`jobs/<id>/claim.<number>.json`: a worker takes the job; the newest claim counts."""

    format: Literal[1] = FORMAT
    job: _JobId
    number: Number
    worker: Text
    software: Text
    time: Timestamp
    transaction: Transaction


class HeartbeatRecord(Record):
    """`jobs/<id>/beat.<claim>.<number>.json`: the worker is alive, with its progress."""

    format: Literal[1] = FORMAT
    job: _JobId
    claim: Number
    number: Number
    phase: Text
    share: Share | None
    """The part of the phase that is done; None if it is unknown."""
    seconds_left: Annotated[float, Field(ge=0, le=1e9)] | None
    log: Log
    time: Timestamp
    transaction: Transaction


class DoubtRecord(Record):
    """`jobs/<id>/doubt.<claim>.<beat>.<transaction>.json`: the newest sign of life is dated in the
    future, so its age counts from here."""

    format: Literal[1] = FORMAT
    job: _JobId
    claim: Number
    beat: Annotated[int, Field(ge=0, le=99_999_999)]
    time: Timestamp
    transaction: Transaction


class TurnRecord(Record):
    """`jobs/turns/<channel>.<number>.json`: of all who ask at once, one may make a job."""

    format: Literal[1] = FORMAT
    channel: ChannelName
    number: Number
    job: _JobId
    time: Timestamp
    transaction: Transaction


class MadeRecord(SignedRecord):
    """`jobs/<id>/version.<version>.json`: the job has published a version."""

    signed_kind: ClassVar[str] = "job-version"
    format: Literal[1] = FORMAT
    job: _JobId
    claim: Number
    version: Version
    time: Timestamp
    transaction: Transaction


class CancelRecord(Record):
    """`jobs/<id>/cancel.json`: somebody cancels the job."""

    format: Literal[1] = FORMAT
    job: _JobId
    actor: Text
    time: Timestamp
    transaction: Transaction


class MadeVersion(Record):
    """A version of a job. `refused` says why it was not promoted."""

    version: Version
    promoted: bool
    refused: Text | None


class EndRecord(Record):
    """`jobs/<id>/end.json`: the job has ended. `claim` is 0 if no worker had it."""

    format: Literal[1] = FORMAT
    job: _JobId
    claim: Annotated[int, Field(ge=0, le=99_999_999)]
    outcome: JobOutcome
    reason: Text
    versions: Annotated[tuple[MadeVersion, ...], Field(max_length=1000)]
    log: Log
    time: Timestamp
    transaction: Transaction
