"""Define the JSON of the protocol. Unknown fields of requests are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from dne_serve.inference.answers import MAX_TOP_K

Datatype = Literal["BYTES", "UINT8", "FP32", "BOOL"]
State = Literal["READY", "UNAVAILABLE"]
Size = Annotated[int, Field(strict=True, ge=0, le=1 << 40)]
Flag = Annotated[bool, Field(strict=True)]

MAX_JSON_VALUES = 500_000
"""Numbers, lists and objects in one JSON text: each costs tens of bytes and some time."""
MAX_TENSORS = 16
MAX_DIMENSIONS = 8
MAX_ID = 1000


class RequestPart(BaseModel):
    """A part of a request. `null` counts as left out, as some clients write it."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class InputParameters(RequestPart):
    binary_data_size: Size | None = None
    shared_memory_region: Any = None


class RequestInput(RequestPart):
    """A tensor. `data` is in row-major order, nested like `shape` or flat; without it the values
    are binary."""

    name: str
    shape: Annotated[list[Size], Field(min_length=1, max_length=MAX_DIMENSIONS)]
    datatype: str
    parameters: InputParameters = InputParameters()
    data: list[Any] | None = None


class OutputParameters(RequestPart):
    binary_data: Flag | None = None
    classification: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP_K)] = 0
    shared_memory_region: Any = None


class RequestOutput(RequestPart):
    name: str
    parameters: OutputParameters = OutputParameters()


class RequestParameters(RequestPart):
    binary_data_output: Flag = False


class InferenceRequest(RequestPart):
    """An inference request. Its `id` comes back with the answer. Without `outputs`, the answer has
    all of them."""

    id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    parameters: RequestParameters = RequestParameters()
    inputs: Annotated[list[RequestInput], Field(max_length=MAX_TENSORS)]
    outputs: Annotated[list[RequestOutput], Field(max_length=MAX_TENSORS)] = []


class ResponseOutput(BaseModel):
    """A tensor of an answer. Without `data`, its `binary_data_size` bytes follow the JSON."""

    name: str
    shape: list[int]
    datatype: Datatype
    parameters: dict[str, int] | None = None
    data: list[Any] | None = None


class InferenceAnswer(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[ResponseOutput]


class ErrorAnswer(BaseModel):
    """A refusal. The server's log names the answer by its `instance`."""

    error: str
    instance: str


class LiveAnswer(BaseModel):
    live: bool


class ServerReadyAnswer(BaseModel):
    ready: bool


class ModelReadyAnswer(BaseModel):
    name: str
    ready: bool


class ServerAnswer(BaseModel):
    name: str
    version: str
    extensions: list[str]


class TensorAnswer(BaseModel):
    """An input or output. -1 in `shape` is any size; `parameters.content` describes the values."""

    name: str
    datatype: Datatype
    shape: list[int]
    parameters: dict[str, str]


class ModelAnswer(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorAnswer]
    outputs: list[TensorAnswer]


class ConfigInput(BaseModel):
    name: str
    data_type: str
    dims: list[int]
    optional: bool


class ConfigOutput(BaseModel):
    name: str
    data_type: str
    dims: list[int]


class ConfigValue(BaseModel):
    string_value: str


class ConfigAnswer(BaseModel):
    name: str
    platform: str
    backend: str
    version_policy: dict[str, dict[str, Any]]
    max_batch_size: int
    input: list[ConfigInput]
    output: list[ConfigOutput]
    parameters: dict[str, ConfigValue]


class IndexRequest(RequestPart):
    ready: Flag = False


class IndexRow(BaseModel):
    name: str
    version: str
    state: State
    reason: str


class StateAnswer(BaseModel):
    name: str
    state: State
    reason: str


class LoadRequest(RequestPart):
    parameters: dict[str, Any] = {}


class SpecificVersions(BaseModel):
    model_config = {"extra": "forbid"}

    versions: list[Annotated[int, Field(ge=1)]]


class VersionPolicy(BaseModel):
    model_config = {"extra": "forbid"}

    specific: SpecificVersions


class LoadConfig(BaseModel):
    """Part of a model configuration that this server can follow."""

    model_config = {"extra": "forbid"}

    version_policy: VersionPolicy


class DurationAnswer(BaseModel):
    count: int
    ns: int


class InferenceStatistics(BaseModel):
    success: DurationAnswer
    fail: DurationAnswer
    queue: DurationAnswer
    compute_input: DurationAnswer
    compute_infer: DurationAnswer
    compute_output: DurationAnswer
    cache_hit: DurationAnswer
    cache_miss: DurationAnswer


class BatchStatistics(BaseModel):
    batch_size: int
    compute_input: DurationAnswer
    compute_infer: DurationAnswer
    compute_output: DurationAnswer


class ModelStatistics(BaseModel):
    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    batch_stats: list[BatchStatistics]


class StatisticsAnswer(BaseModel):
    model_stats: list[ModelStatistics]


class TraceAnswer(BaseModel):
    trace_level: list[str]


class LogAnswer(BaseModel):
    log_info: bool
    log_warnings: bool
    log_errors: bool
    log_verbose_level: int
