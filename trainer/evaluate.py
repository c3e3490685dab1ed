"""How good a network is on images with known classes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.codec import load_network
from model_store.errors import ChannelNotFound
from model_store.manifest import Manifest, Preprocessing
from model_store.network import Network, choose_device
from model_store.preprocess import normalise
from model_store.store import Store
from trainer.data import (
    LabelledImages,
    list_classes,
    note_ignored,
    read_images,
    refuse_no_images,
    refuse_unknown_classes,
)
from trainer.progress import Progress

BATCH = 64
CALIBRATION_BINS = 15

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The logits of labelled images, and what follows from them."""

    classes: tuple[str, ...]
    labels_N: NDArray[np.int64]
    logits_NC: Floats

    @property
    def right_N(self) -> NDArray[np.bool_]:
        return np.asarray(self.logits_NC.argmax(axis=1) == self.labels_N, dtype=np.bool_)

    def accuracy(self, among: Collection[str] | None = None) -> float | None:
        """The share that is right; None where there is nothing to judge by."""
        chosen = self.right_N if among is None else self.right_N[self._is_of(among)]
        return float(chosen.mean()) if len(chosen) else None

    def per_class(self) -> dict[str, float]:
        accuracies = {name: self.accuracy({name}) for name in self.classes}
        return {name: value for name, value in accuracies.items() if value is not None}

    def confusion(self) -> dict[str, dict[str, int]]:
        """How often images of a class (outer) were taken for a class (inner); zeros left out."""
        table: dict[str, dict[str, int]] = {}
        pairs = np.stack([self.labels_N, self.logits_NC.argmax(axis=1)], axis=1)
        for (label, guess), count in zip(
            *np.unique(pairs, axis=0, return_counts=True), strict=True
        ):
            table.setdefault(self.classes[label], {})[self.classes[guess]] = int(count)
        return table

    def calibration_error(self, *, temperature: float) -> float | None:
        """Expected calibration error: how far confidence and accuracy lie apart, in 15 bins."""
        if not len(self.labels_N):
            return None
        scaled = self.logits_NC.astype(np.float64) / temperature
        weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        confidence = (weights / weights.sum(axis=1, keepdims=True)).max(axis=1)
        bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
        gaps = [
            abs(float((self.right_N[bins == one] - confidence[bins == one]).sum()))
            for one in range(CALIBRATION_BINS)
        ]
        return sum(gaps) / len(self.labels_N)

    def _is_of(self, among: Collection[str]) -> NDArray[np.bool_]:
        places = [self.classes.index(name) for name in among]
        return np.isin(self.labels_N, places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """What `dne-train evaluate` is asked."""

    store: str
    data: Path
    channel: str
    version: int | None = None
    skip_bad: bool = False
    device: str = "auto"


def evaluate(request: Evaluate, *, progress: Progress) -> dict[str, Any]:
    """Accuracy over all classes of a version, old and new apart, as the command reports it."""
    store = Store.open(request.store)
    manifest = _chosen(store, request)
    listing = list_classes(request.data)
    note_ignored(listing, progress)
    refuse_unknown_classes(listing, manifest.classes, option="--data")
    images = read_images(
        listing, preprocessing=manifest.preprocessing, skip_bad=request.skip_bad, progress=progress
    )
    refuse_no_images(images, listing, option="--data")
    network = load_network(store.read_shard, manifest).to(choose_device(request.device))
    judged = judge(
        network,
        images.among(manifest.spec.classes),
        preprocessing=manifest.preprocessing,
        retired=manifest.retired,
    )
    newest = manifest.spec.tasks[-1].classes
    older = [name for name in manifest.spec.classes if name not in newest]
    return {
        "version": manifest.version,
        "images": len(images),
        "accuracy": {
            "all": judged.accuracy(),
            "old": judged.accuracy(older),
            "new": judged.accuracy(newest),
        },
        "per_class": judged.per_class(),
        "confusion": judged.confusion(),
        "calibration_error": judged.calibration_error(temperature=manifest.calibration.temperature),
    }


def judge(
    network: Network,
    images: LabelledImages,
    *,
    preprocessing: Preprocessing,
    retired: Collection[str] = (),
) -> Judged:
    logits = in_batches(network, images, network.forward, preprocessing=preprocessing)
    return judged_by(logits, images, retired=retired)


def judged_by(
    logits_NC: Floats, images: LabelledImages, *, retired: Collection[str] = ()
) -> Judged:
    """Retired classes are never answered: their logits become minus infinity."""
    if len(logits_NC):
        logits_NC[:, [images.classes.index(name) for name in retired]] = -np.inf
    return Judged(classes=images.classes, labels_N=images.labels_N, logits_NC=logits_NC)


def in_batches(
    network: Network,
    images: LabelledImages,
    read: Callable[[Tensor], Tensor],
    *,
    preprocessing: Preprocessing,
) -> Floats:
    """What `read` makes of all images, one row an image, without gradients."""
    rows = []
    with torch.inference_mode():
        for start in range(0, len(images), BATCH):
            batch = normalise(images.pixels_NHWC[start : start + BATCH], preprocessing)
            rows.append(read(torch.from_numpy(batch).to(network.device)).cpu().numpy())
    return np.concatenate(rows) if rows else np.zeros((0, 1), dtype=np.float32)


def _chosen(store: Store, request: Evaluate) -> Manifest:
    if request.version is not None:
        return store.manifest(request.version)
    head = store.head(request.channel)
    if head is None:
        raise ChannelNotFound(f"channel {request.channel} names no version; give --version N")
    return store.resolve(head)
