"""Write items of the inbox as tasks of Label Studio, and read the label config of a project.

A label config is XML from a stranger. Nothing in it is expanded: a document type, and with it every
entity, is refused. Only tags that give an image a class are read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat

from model_store.errors import LabelConfigInvalid
from model_store.layout import ITEM_ID
from model_store.loop.item_names import is_id
from model_store.records.inbox import ItemRecord

MAX_CHARACTERS = 1_000_000
MAX_TAGS = 20_000
CLASSES = "classes"
"""The key of a task's data that lists the classes."""
IMAGE = "image"
NEW_CLASS = "new_class"
"""The name of the TextArea whose text names a class. Text of other TextAreas is ignored."""
LABEL_CONFIG = f"""\
<View>
  <Image name="{IMAGE}" value="${IMAGE}"/>
  <Choices name="class" toName="{IMAGE}" value="${CLASSES}" choice="single" showInLine="true"/>
  <Header value="Or name a new class:" size="6"/>
  <TextArea name="{NEW_CLASS}" toName="{IMAGE}" maxSubmissions="1" editable="true"/>
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
    if text.count("<") > MAX_TAGS:
        raise LabelConfigInvalid(f"the label config has more than {MAX_TAGS:,} tags")
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
MAX_ADDRESS = 2000
MODEL = "dne-serve-"
IN_ADDRESS = re.compile(rf"(?<![0-9a-z]){ITEM_ID}(?![0-9a-z])")


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
    if not isinstance(address, str) or len(address) > MAX_ADDRESS:
        return None
    ids = IN_ADDRESS.findall(address)
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
        if top.label in classes and controls.offers(top.label):
            return prediction(controls, label=top.label, score=top.score, version=item.version)
    return None
