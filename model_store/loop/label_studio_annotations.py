"""Read annotations of Label Studio, and write them as label records of inbox items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from model_store.errors import LabelInvalid
from model_store.loop.inbox import CLEAR, Inbox, Judgement
from model_store.loop.label_studio_tasks import NEW_CLASS, Controls
from model_store.names import is_same, is_shown
from model_store.records.inbox import LabelRecord
from model_store.records.sealing import timestamp

PREFIX = "label-studio:"
MAX_WHO = 200
MAX_NUMBER = 1 << 63

AnnotationOutcome = Literal["labelled", "cleared", "cancelled", "empty", "already", "overtaken"]
"""`labelled` and `cleared`: a record was written. `cancelled`: the labeller skipped the task.
`empty`: the annotation names no class. `already`: the item has the record. `overtaken`: the item
has a newer label from somebody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """An annotation of a task. `label` is None if it names no class."""

    id: int
    project: int
    label: str | None
    was_cancelled: bool
    who: str
    time: str

    @property
    def key(self) -> str:
        """The end of the actor in every record that comes from this annotation."""
        return key_of(self.project, self.id)

    @property
    def actor(self) -> str:
        return f"{PREFIX}{self.who}{self.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenAnnotation:
    """An annotation's outcome, and the record that was written, if any."""

    outcome: AnnotationOutcome
    record: LabelRecord | None = None


def key_of(project: int, annotation: int) -> str:
    return f"#{project}/{annotation}"


def read_annotation(sent: object, controls: Controls, *, project: int) -> Annotation:
    """Read an annotation as the API and webhooks of Label Studio 1.23 write it. Raise LabelInvalid
    if it cannot be understood, or names several classes."""
    number = number_in(sent)
    if number is None or not isinstance(sent, Mapping):
        raise LabelInvalid("an annotation has no id")
    try:
        label = _label_in(sent.get("result"), controls)
    except LabelInvalid as error:
        raise LabelInvalid(f"annotation {number}: {error}") from error
    return Annotation(
        id=number,
        project=project,
        label=label,
        was_cancelled=sent.get("was_cancelled") is True,
        who=_who(sent),
        time=_time(sent.get("updated_at") or sent.get("created_at")),
    )


def number_in(sent: object) -> int | None:
    """Return the id of an object of Label Studio."""
    number = sent.get("id") if isinstance(sent, Mapping) else sent
    return number if isinstance(number, int) and 0 < number < MAX_NUMBER else None


def take_annotation(
    inbox: Inbox,
    item: str,
    annotation: Annotation,
    *,
    via: str = "",
    known: list[LabelRecord] | None = None,
) -> TakenAnnotation:
    """Write an annotation as a label record of an item, unless it was written before. `via` names
    the client that delivered it. `known` holds the item's oldest records, if the caller has read
    them; newer records are appended to it."""
    history = [] if known is None else known
    history += inbox.history(item, after=len(history))
    head = history[-1] if history else None
    own = [record for record in history if is_from(record, annotation.key)]
    if annotation.was_cancelled or annotation.label is None:
        if head is None or head.kind != "label" or not is_from(head, annotation.key):
            return TakenAnnotation(outcome="cancelled" if annotation.was_cancelled else "empty")
        judgement = CLEAR
    else:
        judgement = Judgement.of_class(annotation.label)
        said = own[-1].label if own else None
        if said is not None and is_same(said, annotation.label):
            return TakenAnnotation(outcome="already")
        if head is not None and head not in own and head.time > annotation.time:
            return TakenAnnotation(outcome="overtaken")
    record = inbox.judge(item, judgement, actor=via + annotation.actor, time=annotation.time)
    return TakenAnnotation(
        outcome="labelled" if record.kind == "label" else "cleared", record=record
    )


def is_from(record: LabelRecord, key: str) -> bool:
    """Return whether a record comes from the annotation with this key."""
    return PREFIX in record.actor and record.actor.endswith(key)


def newest_first(annotations: Sequence[Any]) -> list[Any]:
    """Sort the annotations of a task by time, the newest first."""
    return sorted(annotations, key=_time_in, reverse=True)


def _time_in(annotation: Any) -> str:
    return str(annotation.get("updated_at") or "") if isinstance(annotation, Mapping) else ""


def _label_in(result: object, controls: Controls) -> str | None:
    """Find the class in a result. Prefer a typed name to a chosen one."""
    typed: list[str] = []
    chosen: list[str] = []
    for region in result if isinstance(result, list) else ():
        if not isinstance(region, Mapping) or not isinstance(region.get("value"), Mapping):
            continue
        if region.get("from_name") == controls.choices:
            chosen += _texts(region["value"].get("choices"))
        elif region.get("from_name") == NEW_CLASS:
            typed += [name for name in map(str.strip, _texts(region["value"].get("text"))) if name]
    names = typed or chosen
    if len(names) > 1:
        raise LabelInvalid(f"it names {len(names)} classes, and an image has one")
    return names[0] if names else None


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _who(annotation: Mapping[str, Any]) -> str:
    """Name the labeller by the address in `created_username`, such as "Anna Doe anna@…, 1", or
    else by number: webhooks have no address."""
    named = annotation.get("created_username")
    words = named.rpartition(",")[0].split() if isinstance(named, str) else []
    if words and "@" in words[-1] and len(words[-1]) <= MAX_WHO and is_shown(words[-1]):
        return words[-1]
    number = number_in(annotation.get("completed_by"))
    return "user" if number is None else f"user-{number}"


def _time(sent: object) -> str:
    """Return the time of an annotation, or now if it is in the future or malformed."""
    now = timestamp()
    try:
        moment = datetime.fromisoformat(str(sent))
    except ValueError:
        return now
    if moment.tzinfo is None or not 1970 < moment.year < 9000:
        return now
    return min(now, moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
