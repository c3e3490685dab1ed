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
from model_store.inference.forward import FoldedNetwork
from model_store.network.device import choose_device
from model_store.network.network import Network
from model_store.preprocess import normalise
from model_store.records.manifest import Manifest, Preprocessing
from model_store.store.store import Store
from trainer.data.folders import (
    LabelledImages,
    Listing,
    list_classes,
    list_loose,
    note_ignored,
    read_images,
    refuse_familiar_classes,
    refuse_no_images,
    refuse_unknown_classes,
)
from trainer.evaluation.unknown import tell_apart
from trainer.progress import Progress

BATCH = 64
CALIBRATION_BINS = 15
IMAGES_A_BIN = 20
"""Few images in many bins look badly calibrated whatever the network says."""

Floats = NDArray[np.float32]


def calibration_bins(images: int) -> int:
    return min(CALIBRATION_BINS, max(1, images // IMAGES_A_BIN))


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
        chosen = self.right_N if among is None else self.right_N[self.is_of(among)]
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

    def calibration_error(
        self,
        *,
        temperature: float | NDArray[np.float64],
        among: Collection[str] | None = None,
    ) -> float | None:
        """Expected calibration error: how far confidence and accuracy lie apart, in 15 bins, and
        in fewer where there are not 20 images for each.

        Every image may have a temperature of its own.
        """
        chosen = np.ones(len(self.labels_N), dtype=bool) if among is None else self.is_of(among)
        if not chosen.any():
            return None
        scaled = (self.logits_NC.T.astype(np.float64) / temperature).T
        weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        confidence = (weights.max(axis=1) / weights.sum(axis=1))[chosen]
        right = self.right_N[chosen]
        count = calibration_bins(len(right))
        bins = np.minimum((confidence * count).astype(int), count - 1)
        gaps = [
            abs(float((right[bins == one] - confidence[bins == one]).sum())) for one in range(count)
        ]
        return sum(gaps) / len(right)

    def take(self, rows: NDArray[np.int64]) -> Judged:
        return Judged(
            classes=self.classes, labels_N=self.labels_N[rows], logits_NC=self.logits_NC[rows]
        )

    def is_of(self, among: Collection[str]) -> NDArray[np.bool_]:
        """Which images are of one of these classes."""
        places = [self.classes.index(name) for name in among]
        return np.isin(self.labels_N, places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """What `dne-train evaluate` is asked."""

    store: str
    data: Path
    channel: str
    version: int | None = None
    unknown_data: Path | None = None
    skip_bad: bool = False
    device: str = "auto"


def evaluate(request: Evaluate, *, progress: Progress) -> dict[str, Any]:
    """Accuracy over all classes of a version, old and new apart, as the command reports it."""
    store = Store.open(request.store)
    manifest = _chosen(store, request)
    known, strangers = _read_known(request, manifest, progress), None
    if request.unknown_data is not None:
        strangers = _read_strangers(request.unknown_data, request, manifest, progress)
    network = load_network(store.read_shard, manifest).to(choose_device(request.device))
    judged = judge(network, known, preprocessing=manifest.preprocessing, retired=manifest.retired)
    newest = manifest.spec.tasks[-1].classes
    older = [name for name in manifest.spec.classes if name not in newest]
    parts = {"all": manifest.spec.classes, "old": older, "new": newest}
    temperature = manifest.calibration.temperature
    errors = {
        when: {name: judged.calibration_error(temperature=one, among=parts[name]) for name in parts}
        for when, one in (("before", 1.0), ("after", temperature))
    }
    return {
        "version": manifest.version,
        "images": len(known),
        "accuracy": {name: judged.accuracy(among) for name, among in parts.items()},
        "per_class": judged.per_class(),
        "confusion": judged.confusion(),
        "calibration_error": errors["after"]["all"],
        "calibration": {"temperature": temperature, **errors},
        "unknown": tell_apart(
            judged.logits_NC,
            _answered_logits(network, strangers, manifest) if strangers else None,
            detector=manifest.unknown,
        ),
    }


def _answered_logits(network: Network, images: LabelledImages, manifest: Manifest) -> Floats:
    """Of images that belong to no class, so only the columns of classes that are answered."""
    folded = FoldedNetwork.of(network)
    logits = in_batches(network, images, folded, preprocessing=manifest.preprocessing)
    return logits[:, list(manifest.places)]


def _read_known(request: Evaluate, manifest: Manifest, progress: Progress) -> LabelledImages:
    listing = list_classes(request.data).spelt_as(manifest.spec.classes)
    refuse_unknown_classes(listing, manifest.classes, option="--data")
    images = _read(listing, request, manifest, progress, option="--data")
    return images.among(manifest.spec.classes)


def _read_strangers(
    folder: Path, request: Evaluate, manifest: Manifest, progress: Progress
) -> LabelledImages:
    listing = list_loose(folder, option="--unknown-data").spelt_as(manifest.spec.classes)
    refuse_familiar_classes(listing, manifest.spec.classes, option="--unknown-data")
    return _read(listing, request, manifest, progress, option="--unknown-data")


def _read(
    listing: Listing, request: Evaluate, manifest: Manifest, progress: Progress, *, option: str
) -> LabelledImages:
    note_ignored(listing, progress)
    images = read_images(
        listing, preprocessing=manifest.preprocessing, skip_bad=request.skip_bad, progress=progress
    )
    refuse_no_images(images, listing, option=option)
    return images


def judge(
    network: Network,
    images: LabelledImages,
    *,
    preprocessing: Preprocessing,
    retired: Collection[str] = (),
) -> Judged:
    folded = FoldedNetwork.of(network)
    logits = in_batches(network, images, folded, preprocessing=preprocessing)
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
