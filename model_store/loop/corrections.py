"""Correct images that versions keep: move one to another class, or take it out.

A correction is a record that is created once. It waits until a version of the channel has been
learnt with it: it stands as long as the channel's head keeps the image under the old class.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from model_store.backends.base import parsed
from model_store.errors import (
    CorrectionRefused,
    KeptTooLarge,
    RecordInvalid,
    ShardForgotten,
    StoreUnsupported,
    WrongUsage,
)
from model_store.loop.item_names import CORRECTIONS, correction_name, correction_of, new_id
from model_store.names import is_same, spelt_among
from model_store.records.inbox import CorrectionRecord
from model_store.records.manifest import ClassImages, Manifest
from model_store.records.sealing import create_record, find_record, make_record
from model_store.store.shard import read_kept
from model_store.store.store import Store

_MAX_CORRECTIONS = 10_000
NAMES = {"memory": "exemplar", "held-out": "held-out image"}
"""What people are told of an image that the store keeps: its file is gone."""
_SAID = re.compile(r"(exemplar|held-out image) ([1-9][0-9]{0,8}) of (.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptImage:
    """An image that a version keeps, as the store has it."""

    entry: ClassImages
    number: int
    """Its place among the images of its entry, from 1 on."""
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def name(self) -> str:
        return f"{NAMES[self.entry.shard.kind]} {self.number} of {self.entry.class_name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMove:
    """An image that leaves the class `label`, for the class that the record names, or for none."""

    record: CorrectionRecord
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """Corrections that wait for a version, and others with the reason why they cannot be learnt as
    they are."""

    waiting: tuple[ImageMove, ...] = ()
    left: tuple[tuple[CorrectionRecord, str], ...] = ()


def kept_images(store: Store, manifest: Manifest, label: str) -> Iterator[KeptImage]:
    """Read the images that a version keeps of a class: to learn from, then to judge by. There are
    none of a class that was forgotten."""
    for entry in (*manifest.memory, *manifest.held_out):
        if is_same(entry.class_name, label) and entry.count:
            try:
                images = read_kept(store.read_stored_shard, entry)
            except ShardForgotten:
                continue
            for number, data in enumerate(images, start=1):
                yield KeptImage(entry=entry, number=number, data=data)


def correct(
    store: Store,
    manifest: Manifest,
    *,
    image: str,
    label: str,
    to: str | None,
    actor: str,
    reason: str,
) -> CorrectionRecord:
    """Say that an image which a version keeps is of another class, or of no use (`to` is None).
    `image` is its digest. Raise CorrectionRefused where that cannot be learnt."""
    label = _answered(manifest, label, what="the class of the image")
    goal = None if to is None else _answered(manifest, to, what="the right class")
    if len(store.objects.list_names(CORRECTIONS)) >= _MAX_CORRECTIONS:
        raise CorrectionRefused(f"the store has {_MAX_CORRECTIONS} corrections, and takes no more")
    images = list(kept_images(store, manifest, label))
    if image not in {kept.sha256 for kept in images}:
        raise CorrectionRefused(
            f"version {manifest.version} keeps no such image of {label!r}: it was corrected "
            "before, dropped, or forgotten"
        )
    if goal != label and all(kept.sha256 == image for kept in images):
        raise CorrectionRefused(
            f"it is the last image that is kept of {label!r}: `dne-store retire-class` takes a "
            "class away"
        )
    record = make_record(
        CorrectionRecord,
        id=new_id(),
        image=image,
        label=label,
        to=goal,
        actor=actor,
        reason=reason,
    )
    create_record(store.objects, correction_name(record.id), record)
    return record


def _answered(manifest: Manifest, name: str, *, what: str) -> str:
    """Spell a class as the version does. Raise CorrectionRefused for any other name."""
    known = spelt_among(name, manifest.spec.classes)
    if known is None:
        raise CorrectionRefused(
            f"version {manifest.version} knows no class {name[:200]!r}, and {what} has to be one; "
            "for a new class, put the photo into the inbox with its label"
        )
    if known in manifest.retired:
        raise CorrectionRefused(f"class {known!r} was retired: its images are not learnt any more")
    return known


def image_named(store: Store, manifest: Manifest, name: str) -> KeptImage:
    """Find a kept image by the name that the advice and the report tell people, as in "exemplar 32
    of starfish". Raise WrongUsage for other words, CorrectionRefused where there is none."""
    said = _SAID.fullmatch(name.strip())
    if said is None:
        raise WrongUsage(
            f"{name[:200]!r} names no kept image: write 'exemplar 32 of starfish' or 'held-out "
            "image 3 of starfish'"
        )
    kind, number, label = said[1], int(said[2]), said[3]
    label = _answered(manifest, label, what="the class of the image")
    for kept in kept_images(store, manifest, label):
        if NAMES[kept.entry.shard.kind] == kind and kept.number == number:
            return kept
    raise CorrectionRefused(f"version {manifest.version} keeps no {kind} {number} of {label!r}")


def list_corrections(store: Store) -> list[CorrectionRecord]:
    """Read all corrections, oldest first. Leave out those that cannot be read."""
    found = []
    for correction in parsed(store.objects.list_names(CORRECTIONS), correction_of):
        try:
            record = find_record(store.objects, correction_name(correction), CorrectionRecord)
        except (RecordInvalid, StoreUnsupported):
            continue
        if record is not None and record.id == correction:
            found.append(record)
    return sorted(found, key=lambda one: (one.time, one.id))


def find_corrections(store: Store, manifest: Manifest | None) -> Corrections:
    """Find what a version of a channel has not learnt yet. The newest correction of an image says
    what it is: its copies under other classes that were spoken of have to move."""
    said: dict[str, list[CorrectionRecord]] = {}
    for one in list_corrections(store):
        said.setdefault(one.image, []).append(one)
    if manifest is None or not said:
        return Corrections()
    waiting: list[ImageMove] = []
    left: list[tuple[CorrectionRecord, str]] = []
    names = {name for records in said.values() for name in _classes_of(records)}
    for label in manifest.without_retired(sorted(names & set(manifest.spec.classes))):
        about = {image: records[-1] for image, records in said.items() if _speak_of(records, label)}
        try:
            kept = {one.sha256 for one in kept_images(store, manifest, label)}
        except KeptTooLarge as error:
            left += [(one, str(error)) for one in about.values()]
            continue
        for image in sorted(kept & about.keys()):
            newest = about[image]
            if newest.to is not None and is_same(newest.to, label):
                continue
            why = _why_left(newest, manifest)
            if why is None:
                waiting.append(ImageMove(record=newest, label=label))
            else:
                left.append((newest, why))
    return Corrections(
        waiting=tuple(sorted(waiting, key=lambda one: one.record.time)),
        left=tuple(sorted(left, key=lambda pair: pair[0].time)),
    )


def _speak_of(records: Sequence[CorrectionRecord], label: str) -> bool:
    return any(is_same(name, label) for name in _classes_of(records))


def _why_left(correction: CorrectionRecord, manifest: Manifest) -> str | None:
    try:
        if correction.to is not None:
            _answered(manifest, correction.to, what="the right class")
    except CorrectionRefused as error:
        return str(error)
    return None


def forget_corrections(store: Store, names: Collection[str]) -> int:
    """Delete the corrections that name a class, and return their number."""
    gone = [
        one
        for one in list_corrections(store)
        if any(is_same(said, name) for said in (one.label, one.to or "") for name in names)
    ]
    for one in gone:
        store.objects.delete(correction_name(one.id))
    return len(gone)


def classes_moved(moves: Sequence[ImageMove]) -> tuple[str, ...]:
    """List the classes whose images change."""
    names = (name for move in moves for name in (move.label, move.record.to) if name is not None)
    return tuple(dict.fromkeys(names))


def _classes_of(corrections: Sequence[CorrectionRecord]) -> tuple[str, ...]:
    """List the classes that corrections name."""
    names = (name for one in corrections for name in (one.label, one.to) if name is not None)
    return tuple(dict.fromkeys(names))
