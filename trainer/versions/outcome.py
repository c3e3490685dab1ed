"""Tell the result of a run, as facts for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model_store.records.describe import verdict
from model_store.records.manifest import Manifest, delta_of, total_bytes
from model_store.report.advice import Advice
from trainer.evaluation.forecast import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a run. `refused` says why a version was published and not promoted."""

    manifest: Manifest
    parent: Manifest | None
    promoted: bool
    refused: str | None
    served: int | None
    """The version that the channel names now; None: it names none, or could not be read."""
    forecast: Forecast | None
    """None where nothing was learnt."""
    seconds: float
    advice: Advice | None = None
    """None in the ranks after the first, which has the images' tokens."""
    notes: tuple[str, ...] = ()
    """Warnings about the names of the classes."""
    deeper: Outcome | None = None
    """The version that the run grew and published after this one."""
    grew_by_itself: bool = False
    """True: nobody has asked for the version that was grown, and it may be refused. That is
    `deeper` or, where a run was taken up, this one."""

    @property
    def any_refused(self) -> str | None:
        """Say why this version, or one after it that was asked for, was not promoted."""
        if self.deeper and self.deeper.promoted:
            return None
        if self.grew_by_itself:
            return self.refused if self.deeper else None
        return self.refused or (self.deeper.refused if self.deeper else None)

    def as_json(self) -> dict[str, Any]:
        manifest = self.manifest
        gate = manifest.metrics.gate
        return {
            "version": manifest.version,
            "parent": manifest.parent,
            "tasks": len(manifest.tasks),
            "classes": len(manifest.classes),
            "new_classes": list(manifest.new_classes),
            "extended": list(manifest.extended),
            "corrected": manifest.corrected,
            "deepened": list(manifest.deepened),
            "adapted": manifest.adapted,
            "accuracy": manifest.metrics.accuracy.model_dump(),
            "calibration": manifest.calibration.model_dump(),
            "unknown": manifest.unknown and manifest.unknown.model_dump(),
            "gate": gate and gate.model_dump(by_alias=True),
            "judged": {"old": gate.old_images, "new": gate.new_images} if gate else None,
            "verdict": verdict(manifest),
            "promoted": self.promoted,
            "refused": self.refused,
            "served": self.served,
            "notes": list(self.notes),
            "delta_bytes": total_bytes(delta_of(manifest, self.parent)),
            "total_bytes": total_bytes(manifest.model_shards),
            "memory_bytes": total_bytes(manifest.image_shards),
            "forecast": self.forecast and self.forecast.as_json(),
            "advice": self.advice and self.advice.model_dump(mode="json", by_alias=True),
            "seconds": round(self.seconds, 3),
            "deeper": self.deeper and self.deeper.as_json(),
        }
