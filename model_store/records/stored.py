"""Sealed records in a backend, read and created whole. Knows nothing of what they mean."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from model_store.backends.local import ObjectRefused, Objects
from model_store.errors import RecordInvalid
from model_store.records.manifest import Record, first_reason
from model_store.records.sealing import MAX_RECORD_BYTES, canonical, seal, unseal

T = TypeVar("T", bound=Record)


def read_stored(objects: Objects, name: str, kind: type[T]) -> T:
    """The record under that name. ObjectMissing; RecordInvalid when it cannot be trusted."""
    try:
        body = unseal(name, objects.read(name, max_bytes=MAX_RECORD_BYTES))
    except ObjectRefused as error:
        raise RecordInvalid(name, error.reason) from error
    del body["digest"]
    try:
        # Strict mode takes a JSON list for a tuple only when it reads JSON itself.
        return kind.model_validate_json(canonical(body))
    except ValidationError as error:
        raise RecordInvalid(name, first_reason(error)) from error


def create_stored(objects: Objects, name: str, record: Record) -> bool:
    """True: it is there now and it is ours. False: there was one before."""
    return objects.create(name, seal(record.model_dump(mode="json", by_alias=True)))
