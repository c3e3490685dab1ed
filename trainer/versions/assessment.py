"""Collect what the judging of a version found."""

from __future__ import annotations

from dataclasses import dataclass

from model_store.records.quality import Calibration, Metrics, Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    metrics: Metrics
    calibration: Calibration
    unknown: Unknown | None
    doubt: bytes | None
    """The shard of the score by which `unknown` judges; None for the largest logit."""
