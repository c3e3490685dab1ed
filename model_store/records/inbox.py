"""Define the records of the inbox: items, labels, and the labels that a version has used.

An item is one picture that a server was asked about, and the answer; or a picture that somebody
taught, without an answer. People and programs append label records to it; the newest one counts.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from model_store.errors import SpecInvalid
from model_store.layout import ITEM_ID
from model_store.names import new_class_name
from model_store.records.sealing import (
    FORMAT,
    Record,
    Sha256,
    Share,
    Text,
    Timestamp,
    Transaction,
    Version,
)

_MAX_TOP = 10
MAX_SIDE = 512
"""The longer side of a kept picture, in pixels."""
_RULE_PATTERN = r"^[a-z0-9<=.%]{1,40}$"

_ItemId = Annotated[str, Field(pattern=f"^{ITEM_ID}$")]
MediaType = Literal["image/jpeg", "image/png"]
LabelKind = Literal["label", "wrong", "discard", "clear"]
"""`label`: the picture is of that class. `wrong`: of another class than the answer says. `discard`:
of no use. `clear`: takes back the record before it."""
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
Number = Annotated[int, Field(ge=1, le=99_999_999)]


class TopClass(Record):
    """A class of the answer, and its calibrated probability."""

    label: Annotated[str, Field(max_length=200)]
    score: Share


class KeptPicture(Record):
    """The kept picture: re-encoded, upright, without metadata. `dhash` tells near-duplicates."""

    sha256: Sha256
    bytes: Annotated[int, Field(ge=1, le=16 << 20)]
    type: MediaType
    width: Side
    height: Side
    dhash: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class ItemRecord(Record):
    """`inbox/items/<day>/<id>.json`: a picture, the answer to it, and why it was kept."""

    format: Literal[1] = FORMAT
    id: _ItemId
    time: Timestamp
    picture: KeptPicture
    channel: Text
    version: Version | None
    """The version that answered; None for a picture that was taught."""
    top: Annotated[tuple[TopClass, ...], Field(max_length=_MAX_TOP)]
    """The likeliest classes, the likeliest first; none of a picture that was taught."""
    margin: Share
    """The probability of the likeliest class less that of the second."""
    unknown: bool
    unknown_score: Share | None
    token: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{4,8192}={0,2}$")] | None = None
    """The direction of the oldest expert's slice of the token, a signed byte a channel in base64:
    images that look alike have tokens that point alike."""
    other_version: Version | None = None
    other_label: Annotated[str, Field(max_length=200)] | None = None
    """The answer of a shadow, or of the served version to a canary's picture, if it differs."""
    rules: Annotated[
        tuple[Annotated[str, Field(pattern=_RULE_PATTERN)], ...], Field(min_length=1, max_length=20)
    ]
    """The rules that the picture was kept by, or the requests: `keep`, `feedback`, `taught`."""
    transaction: Transaction

    @model_validator(mode="after")
    def _a_version_answers(self) -> Self:
        if (self.version is None) != (not self.top):
            raise ValueError("an item has the answer of a version, or neither of the two")
        return self

    @property
    def answer(self) -> TopClass | None:
        return self.top[0] if self.top else None


class LabelRecord(Record):
    """`inbox/labels/<day>/<id>.<number>.json`: what somebody says of an item."""

    format: Literal[1] = FORMAT
    item: _ItemId
    number: Number
    kind: LabelKind
    label: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    actor: Text
    time: Timestamp
    transaction: Transaction

    @model_validator(mode="after")
    def _only_a_label_has_a_name(self) -> Self:
        if (self.kind == "label") != (self.label is not None):
            raise ValueError("a record of the kind label has a label, and no other has")
        if self.label is not None:
            try:
                checked = new_class_name(self.label)
            except SpecInvalid as error:
                raise ValueError(str(error)) from error
            if checked != self.label:
                raise ValueError("the label is not in NFC")
        return self


class CorrectionRecord(Record):
    """`inbox/corrections/<id>.json`: what somebody says of an image that versions keep. The newest
    one on an image and its class counts."""

    format: Literal[1] = FORMAT
    id: _ItemId
    image: Sha256
    """The digest of the encoded image, as its shard has it."""
    label: Annotated[str, Field(min_length=1, max_length=200)]
    """The class that the image was kept of."""
    to: Annotated[str, Field(min_length=1, max_length=200)] | None
    """The class that it is of: `label` takes back what was said before. None: it is of no use."""
    actor: Text
    reason: Text
    time: Timestamp
    transaction: Transaction


class UsedRecord(Record):
    """`inbox/used/<version>.json`: the label records that a version was taught with."""

    format: Literal[1] = FORMAT
    version: Version
    items: dict[_ItemId, Number]
    """The number of the label record that was used, by item."""
    actor: Text
    time: Timestamp
    transaction: Transaction
