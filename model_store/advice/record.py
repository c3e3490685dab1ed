"""Define the record of advice on a version: what would help it most, by the images of its run.

It stands beside the manifest and not in it: it names files of people, so it can be deleted, and
only those who may label see it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from model_store.layout import ITEM_ID
from model_store.records.fields import (
    Count,
    Record,
    Sha256,
    Share,
    Text,
    Timestamp,
    Transaction,
    Version,
)
from model_store.records.sealing import FORMAT

MAX_NAME = 300
MAX_LISTED = 100
"""Label errors and copies that a record names; it counts them all."""
LOOKED_AT = 6
"""Images that are named of each confusion."""

ClassName = Annotated[str, Field(min_length=1, max_length=200)]
Points = Annotated[float, Field(ge=-1, le=1)]


class AdvisedImage(Record):
    """An image of the run, by its name in the data, and by its id if it is of the inbox."""

    name: Annotated[str, Field(max_length=MAX_NAME)]
    item: Annotated[str, Field(pattern=f"^{ITEM_ID}$")] | None = None


class ClassAdvice(Record):
    """The gain by more images of a class."""

    class_name: ClassName = Field(alias="class")
    images: Count
    accuracy: Share | None
    """The share of left-out images of the class that a classifier on the same tokens has right."""
    more: Count = 0
    gain: Points | None = None
    """The accuracy that so many `more` images would add; null: it cannot be said."""
    why: Text | None = None
    """Why it cannot be said."""


class Confused(Record):
    """Two classes of which left-out images are taken for each other, the doubtful ones named."""

    class_name: ClassName = Field(alias="class")
    taken_for: ClassName
    count: Count
    images: Annotated[tuple[AdvisedImage, ...], Field(max_length=LOOKED_AT)]


class Suspect(Record):
    """An image that is likelier of another class than its label says."""

    image: AdvisedImage
    class_name: ClassName = Field(alias="class")
    likelier: ClassName
    score: Share
    """The likelihood of the label, by the images of all other folds. Small: it is in doubt."""


class Copy(Record):
    """An image to judge by that is nearly the same as one to learn from."""

    judged: AdvisedImage
    learnt: AdvisedImage
    class_name: ClassName = Field(alias="class")
    bits: Annotated[int, Field(ge=0, le=64)]
    """The bits in which their perceptual hashes differ."""


class Advice(Record):
    """The advice itself, the most helpful first."""

    classes: tuple[ClassAdvice, ...] = ()
    confused: Annotated[tuple[Confused, ...], Field(max_length=MAX_LISTED)] = ()
    suspects: Annotated[tuple[Suspect, ...], Field(max_length=MAX_LISTED)] = ()
    suspects_in_all: Count = 0
    copies: Annotated[tuple[Copy, ...], Field(max_length=MAX_LISTED)] = ()
    copies_in_all: Count = 0
    notes: tuple[Text, ...] = ()
    """Sentences on things that could not be said."""


class AdviceRecord(Record):
    """`advice/<version>.json`."""

    format: Literal[1] = FORMAT
    version: Version
    manifest_digest: Sha256
    advice: Advice
    time: Timestamp
    transaction: Transaction
