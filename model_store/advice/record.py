"""Define the record of advice on a version, which names what would help it most.

The record stands beside the manifest, because it names files of people: it can be deleted, and
only clients that may label see it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from model_store.errors import VersionNotFound
from model_store.layout import FORGOTTEN, ITEM_ID, advice_name, forgotten_of
from model_store.names import is_same
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
from model_store.records.manifest import Manifest
from model_store.records.sealing import FORMAT, create_record, find_record, timestamp
from model_store.store.store import Store

MAX_NAME = 300
MAX_LISTED = 100
"""The most label errors, and the most copies, that a record names. It counts all of them."""
LOOKED_AT = 6
"""The most images that a record names for a confusion."""

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
    """The accuracy that `more` images would add; null where there is no forecast."""
    why: Text | None = None
    """The reason why there is no forecast."""


class Confused(Record):
    """Two classes whose left-out images are confused, with the most doubtful images."""

    class_name: ClassName = Field(alias="class")
    taken_for: ClassName
    count: Count
    images: Annotated[tuple[AdvisedImage, ...], Field(max_length=LOOKED_AT)]


class Suspect(Record):
    """An image that probably belongs to another class than its label says."""

    image: AdvisedImage
    class_name: ClassName = Field(alias="class")
    likelier: ClassName
    score: Share
    """The probability of the label, by the images of all other folds. A small one is in doubt."""


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
    """Sentences on what could not be computed."""


class AdviceRecord(Record):
    """`advice/<version>.json`."""

    format: Literal[1] = FORMAT
    version: Version
    manifest_digest: Sha256
    advice: Advice
    time: Timestamp
    transaction: Transaction


def write_advice(store: Store, manifest: Manifest, advice: Advice) -> None:
    """Write the advice on a version that is published. The first one that is written stays."""
    record = AdviceRecord(
        version=manifest.version,
        manifest_digest=manifest.digest,
        advice=advice,
        time=timestamp(),
        transaction=uuid.uuid4().hex,
    )
    create_record(store.objects, advice_name(manifest.version), record)
    # Checked after the write: a deletion that comes later finds the advice and deletes it.
    if not _stands(store, manifest):
        store.objects.delete(advice_name(manifest.version))


def read_advice(store: Store, manifest: Manifest) -> Advice | None:
    """Read the advice on a version. Return None where there is none, and where it is about another
    version that had the number before."""
    record = find_record(store.objects, advice_name(manifest.version), AdviceRecord)
    if record is None or record.manifest_digest != manifest.digest:
        return None
    return record.advice


def drop_advice_on(store: Store, manifests: Iterable[Manifest], class_name: str) -> None:
    """Delete the advice on all versions that know a class: it may name files of the class."""
    for manifest in manifests:
        if any(is_same(name, class_name) for name in manifest.spec.classes):
            store.objects.delete(advice_name(manifest.version))


def _stands(store: Store, manifest: Manifest) -> bool:
    """Return whether the version is there and nothing that it names has been forgotten."""
    try:
        store.manifest(manifest.version)
    except VersionNotFound:
        return False
    gone = {forgotten_of(entry.name) for entry in store.objects.list(FORGOTTEN)}
    return not any(ref.sha256 in gone for ref in manifest.shards)
