"""Write items of the inbox as tasks of Label Studio, and read the label config of a project.

A label config is XML from a stranger. Nothing in it is expanded: a document type, and with it every
entity, is refused. Only tags that give an image a class are read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal
from xml.parsers import expat

from model_store.errors import LabelConfigInvalid, LabelInvalid
from model_store.layout import ITEM_ID
from model_store.loop.inbox import CLEAR, Inbox, Judgement
from model_store.loop.item_names import is_id
from model_store.names import is_same, is_shown
from model_store.records.inbox import ItemRecord, LabelRecord
from model_store.records.sealing import timestamp

MAX_CHARACTERS = 1_000_000
_MAX_TAGS = 20_000
CLASSES = "classes"
"""The key of a task's data that lists the classes."""
IMAGE = "image"
_NEW_CLASS = "new_class"
"""The name of the TextArea whose text names a class. Text of other TextAreas is ignored."""
LABEL_CONFIG = f"""\
<View>
  <Image name="{IMAGE}" value="${IMAGE}"/>
  <Choices name="class" toName="{IMAGE}" value="${CLASSES}" choice="single" showInLine="true"/>
  <Header value="Or name a new class:" size="6"/>
  <TextArea name="{_NEW_CLASS}" toName="{IMAGE}" maxSubmissions="1" editable="true"/>
</View>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """The tags of a label config that give an image a class."""

    choices: str
    """The name of the Choices tag."""
    image: str
    """The name of the Image tag."""
    image_key: str
    """The key of a task's data that holds the address of the image."""
    fixed: frozenset[str] | None = None
    """The choices that the config lists; None where each task lists its own."""

    def offers(self, label: str) -> bool:
        """Return whether a labeller can choose this class."""
        return self.fixed is None or label in self.fixed


@dataclass(slots=True, kw_only=True)
class _Choices:
    attributes: dict[str, str]
    values: list[str] = field(default_factory=list)


class _TagReader:
    """Collect tags while expat parses."""

    def __init__(self) -> None:
        self.images: dict[str, dict[str, str]] = {}
        self.choices: list[_Choices] = []
        self._open: list[_Choices] = []

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "Image":
            self.images.setdefault(attributes.get("name", ""), attributes)
        elif tag == "Choices":
            self._open.append(_Choices(attributes=attributes))
            self.choices.append(self._open[-1])
        elif tag == "Choice" and self._open:
            self._open[-1].values.append(attributes.get("value", ""))

    def end(self, tag: str) -> None:
        if tag == "Choices" and self._open:
            self._open.pop()


def read_label_config(text: str) -> Controls:
    """Find the tags that give an image a class. Raise LabelConfigInvalid if there are none."""
    tags = _read(text)
    for choices in tags.choices:
        name = choices.attributes.get("name", "")
        targets = [name.strip() for name in choices.attributes.get("toName", "").split(",")]
        target = next((target for target in targets if target in tags.images), None)
        if name and target:
            key = tags.images[target].get("value", "")
            is_dynamic = choices.attributes.get("value", "").startswith("$")
            return Controls(
                choices=name,
                image=target,
                image_key=key.removeprefix("$"),
                fixed=None if is_dynamic else frozenset(choices.values),
            )
    raise LabelConfigInvalid(
        "the label config has no <Choices> whose toName is an <Image>: "
        "`dne-train label-studio push` makes a project that has one"
    )


def _read(text: str) -> _TagReader:
    if len(text) > MAX_CHARACTERS:
        raise LabelConfigInvalid(f"the label config is longer than {MAX_CHARACTERS:,} characters")
    if text.count("<") > _MAX_TAGS:
        raise LabelConfigInvalid(f"the label config has more than {_MAX_TAGS:,} tags")
    reader = _TagReader()
    parser = expat.ParserCreate("UTF-8")
    parser.StartDoctypeDeclHandler = _refuse_doctype
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    try:
        parser.Parse(text.encode(), True)
    except expat.ExpatError as error:
        raise LabelConfigInvalid(f"the label config is not XML: {error}") from error
    except UnicodeEncodeError as error:
        raise LabelConfigInvalid("the label config is not Unicode text") from error
    return reader


def _refuse_doctype(*_: object) -> None:
    raise LabelConfigInvalid("the label config has a document type, which is not accepted")


ITEM = "dne_item"
SHA256 = "dne_sha256"
_MAX_ADDRESS = 2000
MODEL = "dne-serve-"
_IN_ADDRESS = re.compile(rf"(?<![0-9a-z]){ITEM_ID}(?![0-9a-z])")


def task_data(item: ItemRecord, *, image: str, classes: Sequence[str]) -> dict[str, Any]:
    """Write the data of a task. `image` is the address of the picture for a labeller's browser."""
    return {
        IMAGE: image,
        CLASSES: class_choices(classes),
        ITEM: item.id,
        SHA256: item.picture.sha256,
    }


def class_choices(classes: Sequence[str]) -> list[dict[str, str]]:
    return [{"value": name} for name in classes]


def item_of(data: object, *, image_key: str = IMAGE) -> str | None:
    """Return the id of the item that a task is about, from its data or from the name of its image.
    Return None for any other task. Follow no address."""
    if not isinstance(data, Mapping):
        return None
    named = data.get(ITEM)
    if isinstance(named, str) and is_id(named):
        return named
    address = data.get(image_key)
    if not isinstance(address, str) or len(address) > _MAX_ADDRESS:
        return None
    ids = _IN_ADDRESS.findall(address)
    return ids[-1] if ids else None


def is_same_picture(data: object, item: ItemRecord) -> bool:
    """Return False if the data of a task names another digest than that of the item's picture."""
    digest = data.get(SHA256) if isinstance(data, Mapping) else None
    return digest is None or digest == item.picture.sha256


def model_version(version: int) -> str:
    """Name a version of the store as Label Studio's `model_version`."""
    return f"{MODEL}{version}"


def is_model_version(name: str) -> bool:
    return name.startswith(MODEL)


def prediction(controls: Controls, *, label: str, score: float, version: int) -> dict[str, Any]:
    """Write an answer as Label Studio's prediction. Tasks are sorted by its score."""
    region = {
        "from_name": controls.choices,
        "to_name": controls.image,
        "type": "choices",
        "value": {"choices": [label]},
        "score": score,
    }
    return {"result": [region], "score": score, "model_version": model_version(version)}


def kept_prediction(
    item: ItemRecord, controls: Controls, *, classes: Collection[str]
) -> dict[str, Any] | None:
    """Write the answer from when the picture was kept: the likeliest class that still exists.
    Return None if none of the top classes exists any more."""
    for top in item.top:
        if item.version and top.label in classes and controls.offers(top.label):
            return prediction(controls, label=top.label, score=top.score, version=item.version)
    return None


PREFIX = "label-studio:"
_MAX_WHO = 200
_MAX_NUMBER = 1 << 63

_AnnotationOutcome = Literal["labelled", "cleared", "cancelled", "empty", "already", "overtaken"]
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

    outcome: _AnnotationOutcome
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
    return number if isinstance(number, int) and 0 < number < _MAX_NUMBER else None


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
        elif region.get("from_name") == _NEW_CLASS:
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
    if words and "@" in words[-1] and len(words[-1]) <= _MAX_WHO and is_shown(words[-1]):
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
