"""Make a store at a location, or show that one could be made there."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Literal

from model_store.backends.base import Objects
from model_store.backends.location import leaving_no_folders, objects_at
from model_store.errors import RecordInvalid, StoreUnsupported
from model_store.layout import STORE, VERSIONS
from model_store.records.fields import Record, Transaction
from model_store.records.sealing import FORMAT, create_record


class StoreRecord(Record):
    """`store.json`: the format and the id of a store."""

    format: Literal[1] = FORMAT
    id: Transaction


def make_store(objects: Objects) -> None:
    """Make a store, unless another process does so at this moment."""
    _refuse_versions(objects)
    _probe(objects)
    create_record(objects, STORE, StoreRecord(id=uuid.uuid4().hex))


def check_location(location: str) -> None:
    """Show that a store can be made at `location`, where there is none, and leave nothing."""
    _refuse_versions(objects_at(location))
    place = _place_of_its_own(location)
    with leaving_no_folders(place):
        _probe(objects_at(place))


def _place_of_its_own(location: str) -> str:
    """Name a folder that no other process uses, on the disk that a store at `location` would be on:
    several may look at one location at a time, and each removes what it has made."""
    if "://" in location:
        return location
    root = Path(location).absolute()
    there = next(one for one in (root, *root.parents) if one.exists())
    return str(there / f".probe-{uuid.uuid4().hex}")


def _refuse_versions(objects: Objects) -> None:
    """Refuse a location that has versions and no `store.json`: it was lost."""
    if objects.list(VERSIONS):
        raise RecordInvalid(STORE, "it is missing, although there are versions") from None


def _probe(objects: Objects) -> None:
    """Check that the backend honours create-if-absent: versions must not be overwritten."""
    name = f"probe-{uuid.uuid4().hex}"
    first, second = b"first", b"second"
    made = objects.create(name, first)
    try:
        remade = objects.create(name, second)
        kept = objects.read(name, max_bytes=len(second)) == first
    finally:
        objects.delete(name)
    if not made or remade or not kept:
        raise StoreUnsupported("the backend overwrites objects, so it cannot hold a store")
