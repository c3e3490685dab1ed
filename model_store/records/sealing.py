"""Seal records, and read and create sealed records in a backend.

The canonical form is UTF-8 JSON with sorted keys, without white space and NaN. The last field,
`digest`, is the SHA-256 of the bytes before it. Any other bytes are refused, so two readers never
understand one record differently.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from model_store.backends.base import ObjectMissing, ObjectRefused, Objects
from model_store.errors import RecordInvalid, StoreUnsupported, WrongUsage

MAX_VERSION = 99_999_999


def _real_time(text: str) -> str:
    """Refuse digits that name no moment, such as month 99. Readers compute with times."""
    datetime.fromisoformat(text)
    return text


Count = Annotated[int, Field(ge=0, lt=1 << 48)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(max_length=2000)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Timestamp = Annotated[
    str,
    Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z$"),
    AfterValidator(_real_time),
]
Transaction = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Version = Annotated[int, Field(ge=1, le=MAX_VERSION)]


class Record(BaseModel):
    """An immutable JSON object whose members are exactly those that are declared."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        populate_by_name=True,
        defer_build=True,  # a command builds the few records that it meets, not all there are
    )


LATER = Field(exclude_if=lambda value: not value)
"""Marks a member that is younger than format 1. It is left out while it has nothing to say, so that
older records keep their bytes."""


class Signature(Record):
    """An Ed25519 signature. The module `signing` checks it.

    Form 2 covers the id of the store too. Form 1 does not, and fits any store.
    """

    form: Annotated[Literal[1, 2], Field(exclude_if=lambda form: form == 1)] = 1
    """Left out where it is 1, as `LATER` members are."""
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    store: Annotated[Transaction | None, LATER] = None
    """The id of the store that the signature is for."""
    value: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]

    @model_validator(mode="after")
    def _form_2_names_a_store(self) -> Self:
        if (self.form == 2) != (self.store is not None):
            raise ValueError("form 2 and the id of a store go together")
        return self


class SignedRecord(Record):
    """A record that may be signed."""

    signed_kind: ClassVar[str]
    """The name of the kind among the signed bytes: no signature fits a record of another kind."""
    signature: Annotated[Signature | None, LATER] = None


def first_reason(error: ValidationError) -> str:
    """Write the first error of pydantic, with its field, as one clause."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])


FORMAT: Literal[1] = 1
MAX_RECORD_BYTES = 16 << 20
SIGNED_AS = b"dne-serve signature 2\n"
"""The first bytes that a signature covers: one that was made for another use never fits."""
DIGEST_FIELD_BYTES = len(',"digest":""}') + 64

T = TypeVar("T", bound=Record)


def read_record(objects: Objects, name: str, kind: type[T]) -> T:
    """Read a record and check its seal and its fields. Raise ObjectMissing where there is none,
    RecordInvalid where it cannot be trusted."""
    return unseal_record(name, read_sealed(objects, name), kind)


def find_record(objects: Objects, name: str, kind: type[T]) -> T | None:
    """Read a record as `read_record` does; return None where there is none."""
    try:
        return read_record(objects, name, kind)
    except ObjectMissing:
        return None


def create_record(objects: Objects, name: str, record: Record) -> bool:
    """Create a record. Return False where there is one under that name already."""
    return objects.create(name, seal_record(record))


def read_sealed(objects: Objects, name: str) -> bytes:
    """Read the bytes of a record, which nobody has checked yet."""
    try:
        return objects.read(name, max_bytes=MAX_RECORD_BYTES)
    except ObjectRefused as error:
        raise RecordInvalid(name, error.reason) from error


def seal_record(record: Record) -> bytes:
    """Write a record without a digest of its own in the sealed form."""
    return seal(record.model_dump(mode="json", by_alias=True))


def unseal_record(name: str, sealed: bytes, kind: type[T]) -> T:
    """Check the seal of `sealed` and the fields of the record in it."""
    body = unseal(name, sealed)
    if "digest" not in kind.model_fields:
        del body["digest"]
    try:
        # Strict mode takes a JSON list for a tuple only when it reads JSON itself.
        return kind.model_validate_json(canonical(body))
    except ValidationError as error:
        raise RecordInvalid(name, first_reason(error)) from error


def make_record(kind: type[T], /, **fields: object) -> T:
    """Make a record. A random transaction and the time of now stand where it has them and they are
    not given. Raise WrongUsage for values that it cannot hold."""
    own = {"time": timestamp(), "transaction": uuid.uuid4().hex}
    try:
        given = {name: one for name, one in own.items() if name in kind.model_fields}
        return kind.model_validate({**given, **fields})
    except ValidationError as error:
        raise WrongUsage(f"that cannot be recorded: {first_reason(error)}") from error


def timestamp() -> str:
    """Write the time of now as records have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seal(body: dict[str, Any]) -> bytes:
    """Write `body`, which must not hold a digest yet, in canonical form, and add its digest."""
    bare = canonical(body)
    return bare[:-1] + f',"digest":"{hashlib.sha256(bare).hexdigest()}"}}'.encode()


def canonical(body: dict[str, Any]) -> bytes:
    """Write `body` in canonical form."""
    return json.dumps(
        body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def signed_bytes(body: dict[str, Any], *, kind: str, store: str) -> bytes:
    """Return the bytes that a signature of form 2 covers: the kind of the record, the id of its
    store, and all members but the signature and the digest."""
    return SIGNED_AS + canonical({"kind": kind, "record": body, "store": store})


def unseal(name: str, sealed: bytes) -> dict[str, Any]:
    """Check the seal and return the body with its digest. The format number is judged first."""
    if len(sealed) > MAX_RECORD_BYTES:
        raise RecordInvalid(name, f"it is larger than {MAX_RECORD_BYTES} bytes")
    body = _parse(name, sealed)
    number = body.get("format")
    if type(number) is not int or number != FORMAT:  # `True` and `1.0` are equal to 1 as well
        raise StoreUnsupported(
            f"{name} has format {number!r}; this software reads format {FORMAT} only"
        )
    digest = body.pop("digest", None)
    try:
        expected = seal(body)
    except (ValueError, RecursionError) as error:  # just shallow enough to read, too deep to write
        raise RecordInvalid(name, f"it has no canonical form ({error})") from error
    if sealed != expected:
        wrong_digest = sealed[:-DIGEST_FIELD_BYTES] == expected[:-DIGEST_FIELD_BYTES]
        reason = "its digest does not match" if wrong_digest else "its bytes are not canonical"
        raise RecordInvalid(name, reason)
    body["digest"] = digest
    return body


def parse_object(data: bytes) -> dict[str, Any]:
    """Read one JSON object. Raise ValueError for doubled keys, NaN and bottomless nesting."""
    try:
        body = json.loads(
            data.decode(), object_pairs_hook=_distinct_keys, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    return body


def _parse(name: str, sealed: bytes) -> dict[str, Any]:
    try:
        return parse_object(sealed)
    except ValueError as error:
        raise RecordInvalid(name, str(error)) from error


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a key is repeated")
    return body


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
