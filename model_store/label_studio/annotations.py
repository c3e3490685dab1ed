"""Read annotations of Label Studio, and write them as label records of inbox items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from model_store.errors import LabelInvalid
from model_store.inbox.inbox import CLEAR, Inbox, Judgement
from model_store.label_studio.label_config import NEW_CLASS, Controls
from model_store.names import is_same, is_shown
from model_store.records.inbox import LabelRecord
from model_store.records.sealing import timestamp

PREFIX = "label-studio:"
MAX_WHO = 200
MAX_NUMBER = 1 << 63

Outcome = Literal["labelled", "cleared", "cancelled", "empty", "already", "overtaken"]
"""`labelled` and `cleared`: a record was written. `cancelled`: the labeller skipped the task.
`empty`: the annotation names no class. `already`: the item has the record. `overtaken`: somebody
has said something of the item since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """One annotation of a task. `label` is None where it names no class."""

    id: int
    project: int
    label: str | None
    was_cancelled: bool
    who: str
    time: str

    @property
    def key(self) -> str:
        """The end of the actor of every record that comes from this annotation."""
        return key_of(self.project, self.id)

    @property
    def actor(self) -> str:
        return f"{PREFIX}{self.who}{self.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """An annotation's outcome, and the record that was written, if any."""

    outcome: Outcome
    record: LabelRecord | None = None


def key_of(project: int, annotation: int) -> str:
    return f"#{project}/{annotation}"


def read_annotation(found: object, controls: Controls, *, project: int) -> Annotation:
    """Read an annotation as the API and webhooks of Label Studio 1.23 write it. Raise LabelInvalid
    for one that cannot be understood, and for one that names several classes."""
    number = number_in(found)
    if number is None or not isinstance(found, Mapping):
        raise LabelInvalid("an annotation has no id")
    try:
        label = _label_in(found.get("result"), controls)
    except LabelInvalid as error:
        raise LabelInvalid(f"annotation {number}: {error}") from error
    return Annotation(
        id=number,
        project=project,
        label=label,
        was_cancelled=found.get("was_cancelled") is True,
        who=_who(found),
        time=_time(found.get("updated_at") or found.get("created_at")),
    )


def number_in(found: object) -> int | None:
    """Return the id of an object of Label Studio."""
    number = found.get("id") if isinstance(found, Mapping) else found
    return number if isinstance(number, int) and 0 < number < MAX_NUMBER else None


def take(inbox: Inbox, item: str, annotation: Annotation, *, via: str = "") -> Taken:
    """Write what an annotation says of an item, unless it was written before. `via` names the
    client that has brought it."""
    history = inbox.history(item)
    head = history[-1] if history else None
    own = [one for one in history if is_from(one, annotation.key)]
    if annotation.was_cancelled or annotation.label is None:
        if head is None or head.kind != "label" or not is_from(head, annotation.key):
            return Taken(outcome="cancelled" if annotation.was_cancelled else "empty")
        judgement = CLEAR
    else:
        judgement = Judgement.of_class(annotation.label)
        said = own[-1].label if own else None
        if said is not None and is_same(said, annotation.label):
            return Taken(outcome="already")
        if head is not None and head not in own and head.time > annotation.time:
            return Taken(outcome="overtaken")
    record = inbox.judge(item, judgement, actor=via + annotation.actor, time=annotation.time)
    return Taken(outcome="labelled" if record.kind == "label" else "cleared", record=record)


def is_from(record: LabelRecord, key: str) -> bool:
    """Tell whether a record comes from the annotation with this key."""
    return PREFIX in record.actor and record.actor.endswith(key)


def newest_first(annotations: Sequence[Any]) -> list[Any]:
    """Sort the annotations of a task by their time, the newest first."""
    return sorted(annotations, key=lambda one: _time_in(one), reverse=True)


def _time_in(found: Any) -> str:
    return str(found.get("updated_at") or "") if isinstance(found, Mapping) else ""


def _label_in(result: object, controls: Controls) -> str | None:
    """Find the class in a result. A typed name counts before a chosen one."""
    typed: list[str] = []
    chosen: list[str] = []
    for region in result if isinstance(result, list) else ():
        if not isinstance(region, Mapping) or not isinstance(region.get("value"), Mapping):
            continue
        if region.get("from_name") == controls.choices:
            chosen += _texts(region["value"].get("choices"))
        elif region.get("from_name") == NEW_CLASS:
            typed += [one for one in map(str.strip, _texts(region["value"].get("text"))) if one]
    names = typed or chosen
    if len(names) > 1:
        raise LabelInvalid(f"it names {len(names)} classes, and an image has one")
    return names[0] if names else None


def _texts(found: object) -> list[str]:
    if isinstance(found, str):
        return [found]
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def _who(found: Mapping[str, Any]) -> str:
    """Name the labeller by the address in `created_username`, which is "Anna Doe anna@…, 1", and
    else by number: webhooks have no address."""
    named = found.get("created_username")
    words = named.rpartition(",")[0].split() if isinstance(named, str) else []
    if words and "@" in words[-1] and len(words[-1]) <= MAX_WHO and is_shown(words[-1]):
        return words[-1]
    number = number_in(found.get("completed_by"))
    return "user" if number is None else f"user-{number}"


def _time(found: object) -> str:
    """Return the time of an annotation, and now for one in the future or without a form."""
    now = timestamp()
    try:
        moment = datetime.fromisoformat(str(found))
    except ValueError:
        return now
    if moment.tzinfo is None or not 1970 < moment.year < 9000:
        return now
    return min(now, moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
