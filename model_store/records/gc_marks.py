"""Marks on shards that nothing names, and who decided what becomes of each.

A mark deletes nothing. Whether the shard under it goes or stays is decided once, by whoever is
first to create the verdict: a sweep takes the shard away, a publisher that needs it keeps it.
So no publisher ever relies on a shard that is about to be deleted, and there is no lock.
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
from model_store.records.fields import Record, Sha256, Transaction
from model_store.records.sealing import FORMAT, create_record, find_record

SWEEP_WINDOW_S = 600.0
"""A sweep that has not taken its shard away after this long is dead, and its verdict is void."""

RESCUE_PAUSE_S = 0.2
Decision = Literal["keep", "sweep"]

_NAME = re.compile(r"condemned/([0-9a-f]{64})\.([0-9a-f]{32})(\.verdict)?\.json")


class MarkRecord(Record):
    format: Literal[1] = FORMAT
    sha256: Sha256
    transaction: Transaction


class Verdict(Record):
    format: Literal[1] = FORMAT
    decision: Decision
    transaction: Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """`since_s`: when it was made, by the backend's clock. `judged_s`: when it was decided."""

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
    """One listing: the marks, and verdicts whose mark is gone already."""

    marks: Sequence[Mark]
    orphans: Sequence[str]


def list_condemned(objects: Objects) -> Condemned:
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
    """Marks a shard. It is not touched before a later run has looked again."""
    mark = Mark(sha256=sha256, id=uuid.uuid4().hex, since_s=0.0, judged_s=None)
    create_record(objects, mark.name, MarkRecord(sha256=sha256, transaction=mark.id))


def decide(objects: Objects, mark: Mark, decision: Decision) -> bool:
    """True: it is decided, and by us. False: somebody else came first."""
    verdict = Verdict(decision=decision, transaction=uuid.uuid4().hex)
    return create_record(objects, mark.verdict_name, verdict)


def read_decision(objects: Objects, mark: Mark) -> Decision | None:
    """What was decided; None when nothing was, or when mark and verdict are gone since."""
    verdict = find_record(objects, mark.verdict_name, Verdict)
    return None if verdict is None else verdict.decision


def is_void(mark: Mark, *, now_s: float) -> bool:
    """Whether a verdict `sweep` on it is so old that its sweep must have died."""
    return mark.judged_s is not None and now_s - mark.judged_s > SWEEP_WINDOW_S


def sweep(
    objects: Objects,
    mark: Mark,
    *,
    delete: Callable[[], None],
    monotonic_s: Callable[[], float] = time.monotonic,
) -> bool:
    """Whether the shard was ours to take away, and is gone."""
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
    """Whether the shard under `mark` is safe from every sweep that knows the mark."""
    return decide(objects, mark, "keep") or read_decision(objects, mark) == "keep"


def clear(objects: Objects, mark: Mark) -> None:
    """Removes a mark that was decided. The mark first: while there is no verdict there must be
    no mark either, or a slow sweep could decide it a second time."""
    objects.delete(mark.name)
    objects.delete(mark.verdict_name)


def rescue(
    objects: Objects, digests: Collection[str], *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """After this no sweep deletes one of `digests`, provided that they were announced before.

    Waits where a sweep has already decided: the shard is about to go, and can then be written.
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
    """Now, by the clock that dates the objects: ours may be wrong."""
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
