"""Mark shards that nothing names, and decide once whether a marked shard goes or stays.

A mark deletes nothing. The first one to create a verdict decides: a sweep deletes the shard, a
publisher that needs the shard keeps it. So no publisher relies on a shard that is about to be
deleted, and there is no lock.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from model_store.backends.base import Entry, Objects
from model_store.errors import StoreError
from model_store.layout import CLOCK, CONDEMNED
from model_store.records.sealing import (
    FORMAT,
    Record,
    Sha256,
    Transaction,
    create_record,
    find_record,
    make_record,
)

SWEEP_WINDOW_S = 600.0
"""A sweep that has not deleted its shard after this time is dead, and its verdict is void."""

RESCUE_PAUSE_S = 0.2
Decision = Literal["keep", "sweep"]

_NAME = re.compile(r"condemned/([0-9a-f]{64})\.([0-9a-f]{32})(\.verdict)?\.json")


class MarkRecord(Record):
    """`condemned/<sha256>.<id>.json`: nothing names that shard."""

    format: Literal[1] = FORMAT
    sha256: Sha256
    transaction: Transaction


class MarkVerdict(Record):
    """`condemned/<sha256>.<id>.verdict.json`: the shard under that mark stays or goes."""

    format: Literal[1] = FORMAT
    decision: Decision
    transaction: Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A mark as it was listed, with the times of mark and verdict by the backend's clock."""

    sha256: str
    id: str
    since_s: float
    judged_s: float | None

    @property
    def name(self) -> str:
        return f"{CONDEMNED}/{self.sha256}.{self.id}.json"

    @property
    def verdict_name(self) -> str:
        return f"{CONDEMNED}/{self.sha256}.{self.id}.verdict.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condemned:
    """The marks of one listing, and `orphans`: verdicts without a mark."""

    marks: Sequence[Mark]
    orphans: Sequence[str]


def list_condemned(objects: Objects) -> Condemned:
    """List all marks and verdicts."""
    marks: dict[tuple[str, str], Entry] = {}
    verdicts: dict[tuple[str, str], Entry] = {}
    for entry in objects.list(CONDEMNED):
        match = _NAME.fullmatch(entry.name)
        if match:
            (verdicts if match[3] else marks)[match[1], match[2]] = entry
    return Condemned(
        marks=[
            Mark(
                sha256=key[0],
                id=key[1],
                since_s=entry.modified_s,
                judged_s=verdicts[key].modified_s if key in verdicts else None,
            )
            for key, entry in sorted(marks.items())
        ],
        orphans=sorted(entry.name for key, entry in verdicts.items() if key not in marks),
    )


def condemn(objects: Objects, sha256: str) -> None:
    """Mark a shard. A later run looks again before it touches the shard."""
    mark = Mark(sha256=sha256, id=uuid.uuid4().hex, since_s=0.0, judged_s=None)
    create_record(objects, mark.name, MarkRecord(sha256=sha256, transaction=mark.id))


def decide(objects: Objects, mark: Mark, decision: Decision) -> bool:
    """Create the verdict on a mark. Return False where another one came first."""
    verdict = make_record(MarkVerdict, decision=decision)
    return create_record(objects, mark.verdict_name, verdict)


def read_decision(objects: Objects, mark: Mark) -> Decision | None:
    """Read the verdict on a mark; None where there is none, or where it is gone since."""
    verdict = find_record(objects, mark.verdict_name, MarkVerdict)
    return None if verdict is None else verdict.decision


def is_void(mark: Mark, *, now_s: float) -> bool:
    """Return whether the verdict `sweep` on a mark is so old that its sweep must have died."""
    return mark.judged_s is not None and now_s - mark.judged_s > SWEEP_WINDOW_S


def sweep(
    objects: Objects,
    mark: Mark,
    *,
    delete: Callable[[], None],
    monotonic_s: Callable[[], float] = time.monotonic,
) -> bool:
    """Decide a mark for the sweep and delete its shard. Return False where another one decided."""
    began_s = monotonic_s()
    if not decide(objects, mark, "sweep"):
        return False
    if find_record(objects, mark.name, MarkRecord) is None:
        objects.delete(mark.verdict_name)  # it was decided and cleared before we came
        return False
    if monotonic_s() - began_s > SWEEP_WINDOW_S / 2:
        return False  # we were held up, and our verdict may be void by now
    delete()
    clear(objects, mark)
    return True


def keep(objects: Objects, mark: Mark) -> bool:
    """Decide a mark for the shard. Return True where no sweep that knows the mark deletes it."""
    return decide(objects, mark, "keep") or read_decision(objects, mark) == "keep"


def clear(objects: Objects, mark: Mark) -> None:
    """Remove a mark that was decided, then its verdict. In the other order a slow sweep could
    decide the mark a second time."""
    objects.delete(mark.name)
    objects.delete(mark.verdict_name)


def rescue(
    objects: Objects, digests: Collection[str], *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Keep shards that were announced before: afterwards no sweep deletes one of `digests`.

    A shard that a sweep has decided on is about to go: wait, so that it can be written again.
    """
    while not all(
        _is_rescued(objects, mark)
        for mark in list_condemned(objects).marks
        if mark.sha256 in digests
    ):
        sleep(RESCUE_PAUSE_S)


def _is_rescued(objects: Objects, mark: Mark) -> bool:
    if keep(objects, mark):
        return True
    return mark.judged_s is not None and is_void(mark, now_s=clock_s(objects))


def clock_s(objects: Objects) -> float:
    """Read the clock that dates the objects: ours may be wrong."""
    with _tick(objects) as name:
        for entry in objects.list(CLOCK):
            if entry.name == name:
                return entry.modified_s
    raise StoreError("the store does not list an object that was just created")


@contextmanager
def _tick(objects: Objects) -> Iterator[str]:
    name = f"{CLOCK}/{uuid.uuid4().hex}"
    objects.create(name, b"")  # empty: on a full disk there is room for a name more often
    try:
        yield name
    finally:
        objects.delete(name)
