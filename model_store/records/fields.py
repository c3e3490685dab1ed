"""Define the fields that several records have, and `Record`, the base class of them all."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_VERSION = 99_999_999

Count = Annotated[int, Field(ge=0, lt=1 << 48)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(max_length=2000)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Timestamp = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z$")]
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


def first_reason(error: ValidationError) -> str:
    """Say in one clause what pydantic found wrong first, and in which field."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
