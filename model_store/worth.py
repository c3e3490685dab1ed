"""Decide from the record of a version whether growing its network is worth the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from model_store.errors import StoreError
from model_store.records.manifest import Manifest, Scalar
from model_store.store.store import Store
from model_store.tables import counted, percent

Kind = Literal["adapter", "dense"]
"""What a deepening learns: changes of the first expert, or an expert that reads it."""
CROSS_VALIDATED = "cross_validation"
"""The figure of a task's training that holds its cross-validated accuracy."""
ADAPTED = "adapted_images"
"""The figure of a task's training that an adaptation leaves."""
FEWEST_IMAGES = 8
"""Images a class, on average, below which there is too little to change all blocks by."""
ENOUGH = {"narrow": 0.85, "wide": 0.95}
"""The cross-validated accuracy from which a classifier on frozen tokens is good enough. Where
earlier blocks tell more than the last one, images are unlike those that the expert was trained on,
and it has more to learn from them."""
_GAIN_SHARE = 0.5
"""The share of the errors that growing usually mends at least (ADR 94 and 97)."""
EPOCHS = 8
FEWEST_PASSES: dict[Kind, int] = {"adapter": 1600, "dense": 10_000}
_MOST_PASSES = 24_000
"""Images in all epochs together. Few images are shown more often, and of many some are not."""
FORWARD_AND_BACKWARD = 2.0
"""The time of a pass that learns, for each millisecond of an image alone: batches are faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The prospect of growing a network that answers some classes badly."""

    accuracy: float
    """Of the version that is there, by cross-validation."""
    classes: int
    kind: Kind = "adapter"
    minutes: int | None = None
    """None where the time of an image was not measured."""
    lost: int = 0
    """Classes with too few images at hand to tell whether an adaptation harms them."""

    @property
    def points(self) -> int:
        """The gain to expect, in points of 100."""
        return round(100 * _GAIN_SHARE * (1 - self.accuracy))

    def __str__(self) -> str:
        takes = "" if self.minutes is None else f" takes about {self.minutes} min and"
        what = "adapting the first expert to" if self.kind == "adapter" else "an expert for"
        said = (
            f"cross-validation: {percent(self.accuracy)}; {what} these {self.classes} "
            f"classes{takes} usually gains {self.points} points or more"
        )
        if not self.lost:
            return said
        return (
            f"{said}, at the cost of {counted(self.lost, 'class', 'classes')} of which fewer than "
            f"{FEWEST_IMAGES} images are kept"
        )


def worth_growing(training: Mapping[str, Scalar], *, images: int, classes: int) -> Worth | None:
    """Judge by the figures of the newest task; None where there is hardly anything to win."""
    accuracy = training.get(CROSS_VALIDATED)
    if not isinstance(accuracy, float | int) or isinstance(accuracy, bool):
        return None  # one class, or too few images to leave any out
    readout = "wide" if training.get("readout") == "wide" else "narrow"
    if accuracy >= ENOUGH[readout] or classes < 2 or images < FEWEST_IMAGES * classes:
        return None
    return Worth(accuracy=float(accuracy), classes=classes)


def worth_of(
    manifest: Manifest, images: Mapping[str, int], *, latency_ms: float | None = None
) -> Worth | None:
    """Judge a version by its record and by the number of images at hand of each class.
    `latency_ms`: the time of one image."""
    counts, kind = [images.get(name, 0) for name in manifest.classes], kind_of(manifest)
    found = worth_growing(
        manifest.tasks[-1].training, images=sum(counts), classes=len(manifest.classes)
    )
    lost = sum(count < FEWEST_IMAGES for count in counts)
    if found is None or kind is None or (lost and kind == "dense"):
        return None
    passes = growing_passes(sum(counts), kind=kind)
    return replace(
        found,
        kind=kind,
        minutes=None if latency_ms is None else _minutes(passes, latency_ms=latency_ms),
        lost=lost,
    )


def growing_passes(images: int, *, kind: Kind) -> int:
    """Count the images in all epochs together."""
    return min(max(EPOCHS * images, FEWEST_PASSES[kind]), _MOST_PASSES)


def _minutes(passes: int, *, latency_ms: float) -> int:
    return max(1, round(passes * FORWARD_AND_BACKWARD * latency_ms / 60_000))


def latency_of(store: Store, manifest: Manifest) -> float | None:
    """Find the newest time of an image: a version without one costs as much as its parent."""
    version: Manifest | None = manifest
    while version is not None:
        run = version.metrics.run
        if run is not None and run.latency_ms is not None:
            return run.latency_ms
        version = store.parent_of(version)
    return None


def kind_of(manifest: Manifest) -> Kind | None:
    """Choose how a version can grow; None where an expert is all that it could get, and no task
    lacks one."""
    if can_adapt(manifest):
        return "adapter"
    return "dense" if manifest.spec.tasks_without_expert else None


def can_adapt(manifest: Manifest) -> bool:
    """Return whether the first expert may change: no younger expert reads it, and it came from a
    file as it is."""
    return (
        manifest.spec.is_pretrained
        and len(manifest.experts) == 1
        and not manifest.tasks[0].training.get("unfrozen_blocks")
    )


def proposed(manifest: Manifest, *, latency_ms: float | None = None) -> Worth | None:
    """Propose to adapt a version by the images that the store keeps. None where little is to win,
    where it would harm classes without images, and where it was done."""
    if not can_adapt(manifest) or ADAPTED in manifest.tasks[-1].training:
        return None
    kept = {entry.class_name: entry.count for entry in manifest.memory}
    found = worth_of(manifest, kept, latency_ms=latency_ms)
    return None if found is None or found.lost else found


def proposal(store: Store, manifest: Manifest) -> Worth | None:
    """Propose to adapt a version, unless that was tried: a version was adapted from it."""
    if proposed(manifest) is None:
        return None
    try:
        if grown_from(store, manifest, kind="adapter") is not None:
            return None
        return proposed(manifest, latency_ms=latency_of(store, manifest))
    except StoreError:  # a version that cannot be read may be the one that was adapted
        return None


def grown_from(store: Store, manifest: Manifest, *, kind: Kind) -> int | None:
    """Find a version that was grown from this one; None if there is none."""
    for number in store.versions():
        if number > manifest.version:
            child = store.manifest(number)
            grown = child.adapted if kind == "adapter" else bool(child.deepened)
            if grown and child.parent_digest == manifest.digest:
                return number
    return None
