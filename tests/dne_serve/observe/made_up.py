"""Events of requests that nobody made."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from dne_serve.engines.base import Floats, Resident
from dne_serve.engines.scored import Scored
from dne_serve.observe.events import Answered, By, Times
from model_store.records.quality import Metrics


def resident(version: int = 1, *, classes: int = 3, temperature: float = 1.0) -> Resident:
    """Make a version as far as subscribers look at it."""
    calibration = SimpleNamespace(temperature=temperature)
    labels = tuple(f"class {index}" for index in range(classes))
    manifest = SimpleNamespace(calibration=calibration, metrics=Metrics())
    fake = SimpleNamespace(version=version, labels=labels, manifest=manifest)
    return cast(Resident, fake)


def logits(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


def answered(
    by_version: Resident,
    *rows: Floats,
    unknown: int = 0,
    by: By = "served",
    is_traffic: bool = True,
) -> Answered:
    """Make the event of a request with an image for each row. The first images are unknown."""
    return Answered(
        resident=by_version,
        by=by,
        images=len(rows),
        times=Times(began_ns=0, ended_ns=100),
        decoding=Times(began_ns=0, ended_ns=40),
        scored=tuple(_scored(by_version, rows, unknown)),
        is_traffic=is_traffic,
    )


def failed(
    by_version: Resident, error: Exception, *, images: int = 1, decoded: bool = True
) -> Answered:
    """Make the event of a request that failed, after its images were decoded or before."""
    return Answered(
        resident=by_version,
        by="served",
        images=images,
        times=Times(began_ns=0, ended_ns=100),
        decoding=Times(began_ns=0, ended_ns=40) if decoded else None,
        error=error,
    )


def _scored(by_version: Resident, rows: Sequence[Floats], unknown: int) -> list[Scored]:
    temperature = by_version.manifest.calibration.temperature
    return [
        Scored(logits=row, temperature=temperature, is_unknown=place < unknown, unknown_score=None)
        for place, row in enumerate(rows)
    ]
