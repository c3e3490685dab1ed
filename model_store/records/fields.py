"""Define the fields that several records have, and `Record`, the base class of them all."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

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


class Signature(Record):
    """An Ed25519 signature. The module `signing` checks it.

    Form 2 covers the id of the store too. Form 1 does not, and fits any store.
    """

    form: Annotated[Literal[1, 2], Field(exclude_if=lambda form: form == 1)] = 1
    """Left out where it is 1: manifests that are older than the member keep their bytes."""
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    store: Annotated[Transaction | None, Field(exclude_if=lambda store: store is None)] = None
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
    signature: Annotated[Signature | None, Field(exclude_if=lambda found: found is None)] = None
    """Left out where there is none: records that are older than the member keep their bytes."""


def first_reason(error: ValidationError) -> str:
    """Say in one clause what pydantic found wrong first, and in which field."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
