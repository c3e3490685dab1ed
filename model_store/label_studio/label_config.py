"""Read the label config of a Label Studio project, and write the one of our own projects.

A label config is XML that a stranger may have written. Nothing of it is expanded: a document type,
and with it every entity, is refused. Only tags that give an image a class are taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.parsers import expat

from model_store.errors import LabelConfigInvalid

MAX_CHARACTERS = 1_000_000
CLASSES = "classes"
"""The key of a task's data that lists the classes."""
IMAGE = "image"
NEW_CLASS = "new_class"
"""The name of a TextArea whose text names a class. Text of any other TextArea is no class."""
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
        """Tell whether a labeller can choose this class."""
        return self.fixed is None or label in self.fixed


@dataclass(slots=True, kw_only=True)
class _Choices:
    attributes: dict[str, str]
    values: list[str] = field(default_factory=list)


class _Reader:
    """Collects tags while expat reads."""

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
    """Find the tags that give an image a class. Raise LabelConfigInvalid where there are none."""
    found = _read(text)
    for choices in found.choices:
        name = choices.attributes.get("name", "")
        targets = [one.strip() for one in choices.attributes.get("toName", "").split(",")]
        target = next((one for one in targets if one in found.images), None)
        if name and target:
            key = found.images[target].get("value", "")
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


def _read(text: str) -> _Reader:
    if len(text) > MAX_CHARACTERS:
        raise LabelConfigInvalid(f"the label config is longer than {MAX_CHARACTERS:,} characters")
    reader = _Reader()
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
    raise LabelConfigInvalid("the label config has a document type, which is not read")
