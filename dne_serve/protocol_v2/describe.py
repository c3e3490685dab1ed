"""Describe the server, its model and the model's versions. Loads nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dne_serve.errors import NotInMemory, NotReady, public_message
from dne_serve.models import ModelState
from dne_serve.observe.metrics import Duration
from dne_serve.protocol_v2.answers import OUTPUTS
from dne_serve.protocol_v2.images import ANY, INPUTS
from dne_serve.protocol_v2.schemas import (
    BatchStatistics,
    ConfigAnswer,
    ConfigInput,
    ConfigOutput,
    ConfigValue,
    DurationAnswer,
    IndexRow,
    InferenceStatistics,
    LogAnswer,
    ModelAnswer,
    ModelStatistics,
    ServerAnswer,
    TensorAnswer,
)
from dne_serve.server import DRAINS, Serving
from dne_serve.settings import Settings
from model_store import __version__
from model_store.errors import DneError
from model_store.records.manifest import Manifest
from model_store.store.store import Store

_MAX_INDEXED = 100
"""Versions in the index: each takes one read of a manifest."""

EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "statistics",
)
_CONFIG_TYPES = {
    "BYTES": "TYPE_STRING",
    "UINT8": "TYPE_UINT8",
    "FP32": "TYPE_FP32",
    "BOOL": "TYPE_BOOL",
}
_LEVELS = ("debug", "info", "warning", "error")


def server() -> ServerAnswer:
    return ServerAnswer(name="dne-serve", version=__version__, extensions=list(EXTENSIONS))


def why_not_ready(serving: Serving) -> NotReady:
    missing = f"channel {serving.settings.channel} names no version yet"
    return NotReady(serving.error or missing)


def manifest_of(serving: Serving, version: int | None) -> Manifest:
    """Return the manifest of any version in the store, or of the served one."""
    if version is not None:
        return serving.open_store().manifest(version)
    if serving.loaded.served is None:
        raise why_not_ready(serving)
    return serving.loaded.served.manifest


def model(serving: Serving, manifest: Manifest) -> ModelAnswer:
    preprocessing = manifest.preprocessing
    return ModelAnswer(
        name=serving.settings.model_name,
        versions=[str(number) for number in serving.open_store().versions()],
        platform=_platform(serving),
        inputs=[
            TensorAnswer(
                name=input.name,
                datatype=input.datatype,
                shape=list(input.shape(preprocessing)),
                parameters={"content": input.content(preprocessing)},
            )
            for input in INPUTS.values()
        ],
        outputs=[
            TensorAnswer(
                name=offer.name,
                datatype=offer.datatype,
                shape=list(offer.shape(ANY, len(_labels(manifest)))),
                parameters={"content": offer.content},
            )
            for offer in OUTPUTS.values()
        ],
    )


def config(serving: Serving, manifest: Manifest) -> ConfigAnswer:
    """Write a Triton model configuration. A batch size of 0 says that shapes are whole."""
    preprocessing = manifest.preprocessing
    told = {
        "labels": json.dumps(_labels(manifest), ensure_ascii=False),
        "version": str(manifest.version),
        "image_size": str(preprocessing.image_size),
        "mean": json.dumps(preprocessing.mean),
        "std": json.dumps(preprocessing.std),
        "max_images": str(serving.settings.max_images),
    }
    return ConfigAnswer(
        name=serving.settings.model_name,
        platform=_platform(serving),
        backend=serving.engine.backend,
        version_policy={"all": {}},
        max_batch_size=0,
        input=[
            ConfigInput(
                name=input.name,
                data_type=_CONFIG_TYPES[input.datatype],
                dims=list(input.shape(preprocessing)),
                optional=True,
            )
            for input in INPUTS.values()
        ],
        output=[
            ConfigOutput(
                name=offer.name,
                data_type=_CONFIG_TYPES[offer.datatype],
                dims=list(offer.shape(ANY, len(_labels(manifest)))),
            )
            for offer in OUTPUTS.values()
        ],
        parameters={name: ConfigValue(string_value=value) for name, value in told.items()},
    )


def index(serving: Serving, *, only_ready: bool) -> list[IndexRow]:
    """List the newest versions in the store. An unreadable one does not hide the others."""
    store = serving.open_store()
    rows = [_row(serving, store, number) for number in store.versions()[-_MAX_INDEXED:]]
    return [row for row in rows if row.state == "READY" or not only_ready]


MAX_MODELS = 1000
"""Models in the index, in alphabetical order. `GET /models` lists all, in pages."""


def index_of(states: Sequence[ModelState], *, only_ready: bool) -> list[IndexRow]:
    """List models by their served versions."""
    rows = [
        IndexRow(
            name=state.name,
            version="" if state.version is None else str(state.version),
            state="READY" if state.loaded and state.version is not None else "UNAVAILABLE",
            reason=state.error or ("" if state.loaded else "it is loaded by its first request"),
        )
        for state in states
    ]
    return [row for row in rows if row.state == "READY" or not only_ready]


def _row(serving: Serving, store: Store, version: int) -> IndexRow:
    reason = ""
    try:
        _check_askable(serving, store, version)
    except DneError as error:
        reason = public_message(error)
    return IndexRow(
        name=serving.settings.model_name,
        version=str(version),
        state="UNAVAILABLE" if reason else "READY",
        reason=reason,
    )


def check_ready(serving: Serving, version: int | None) -> None:
    """Raise the reason why a request cannot be answered at once. Looks at memory only: anybody may
    ask, as often as they like, and learns nothing of the store."""
    if serving.drains:
        raise NotReady(DRAINS)
    if serving.reloader.withdrawn or (version is None and serving.loaded.served is None):
        raise why_not_ready(serving)
    if version is None or any(manifest.version == version for manifest in serving.loaded.manifests):
        return
    _check_not_failed(serving, version)
    raise NotInMemory(
        f"version {version} is not in memory; a request that names it loads it, if there is one"
    )


def _check_askable(serving: Serving, store: Store, version: int) -> None:
    """Raise the reason why a request that names this version cannot be answered, as far as it is
    known without loading. Reads the store."""
    if serving.reloader.withdrawn:
        raise why_not_ready(serving)
    store.keys.check_version(store.manifest(version))
    _check_not_failed(serving, version)


def _check_not_failed(serving: Serving, version: int) -> None:
    failure = serving.reloader.failure
    if failure is not None and failure.record is not None and failure.record.target == version:
        raise NotReady(public_message(failure.error))


def every_statistics(serving: Serving) -> list[ModelStatistics]:
    """Count the answers of each version of a model."""
    served = serving.loaded.served
    versions = {*serving.statistics.versions, *([served.version] if served else [])}
    return [statistics(serving, version) for version in sorted(versions)]


def statistics(serving: Serving, version: int) -> ModelStatistics:
    counts = serving.statistics.of(version)
    nothing = DurationAnswer(count=0, ns=0)
    return ModelStatistics(
        name=serving.settings.model_name,
        version=str(version),
        last_inference=counts.last_answer_ms,
        inference_count=counts.images,
        execution_count=sum(batch.count for batch in counts.batches.values()),
        inference_stats=InferenceStatistics(
            success=_duration(counts.success),
            fail=_duration(counts.fail),
            queue=_duration(counts.queue),
            compute_input=_duration(counts.decode),
            compute_infer=_duration(counts.run),
            compute_output=nothing,
            cache_hit=nothing,
            cache_miss=nothing,
        ),
        batch_stats=[
            BatchStatistics(
                batch_size=size,
                compute_input=nothing,
                compute_infer=_duration(batch),
                compute_output=nothing,
            )
            for size, batch in sorted(counts.batches.items())
        ],
    )


def log(settings: Settings) -> LogAnswer:
    verbosity = _LEVELS.index(settings.log_level)
    return LogAnswer(
        log_info=verbosity <= _LEVELS.index("info"),
        log_warnings=verbosity <= _LEVELS.index("warning"),
        log_errors=True,
        log_verbose_level=int(settings.log_level == "debug"),
    )


def _duration(duration: Duration) -> DurationAnswer:
    return DurationAnswer(count=duration.count, ns=duration.ns)


def _labels(manifest: Manifest) -> Sequence[str]:
    """List the classes that are answered, in the order of the outputs."""
    return [label for task in manifest.tasks for label in manifest.without_retired(task.classes)]


def _platform(serving: Serving) -> str:
    return f"dne_{serving.engine.backend}"
