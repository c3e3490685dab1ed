"""Measure a version on a folder of images with known classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model_store.codec import load_doubt, load_network
from model_store.errors import ChannelNotFound
from model_store.inference.doubt import Doubt
from model_store.inference.forward import Lineage
from model_store.network.device import choose_device
from model_store.network.network import Network
from model_store.records.hierarchy import Hierarchy, Levels
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from trainer.data.checks import refuse_familiar_classes, refuse_no_images, refuse_unknown_classes
from trainer.data.folders import LabelledImages, Listing, note_ignored, read_images
from trainer.data.sources.forms import list_judged, list_strangers
from trainer.embeddings.cache import EmbeddingCache, Floats
from trainer.embeddings.reading import reader_of
from trainer.evaluation.judged import Judged, judged_by
from trainer.evaluation.unknown import Doubted, scores_of, tell_apart
from trainer.progress import Progress
from trainer.request import Evaluate


def measure_levels(
    judged: Judged, hierarchy: Hierarchy | None, *, temperature: float
) -> dict[str, Any] | None:
    """Count the images that a group answers, and how many answers are right at any level.

    Return None without groups or without images.
    """
    if hierarchy is None or not len(judged.labels_N):
        return None
    levels = Levels(hierarchy, judged.classes)
    higher = right_higher = right = 0
    for logits_C, label in zip(judged.logits_NC, judged.labels_N.tolist(), strict=True):
        scaled_C = logits_C.astype(np.float64) / temperature
        weights_C = np.exp(scaled_C - scaled_C.max())
        found = levels.higher((weights_C / weights_C.sum()).tolist())
        if found is None:
            right += int(logits_C.argmax() == label)
            continue
        fits = found.name in hierarchy.above(judged.classes[label])
        higher, right_higher, right = higher + 1, right_higher + fits, right + fits
    images = len(judged.labels_N)
    return {
        "answered_by_groups": higher / images,
        "right_of_these": right_higher / higher if higher else None,
        "right_at_any_level": right / images,
    }


def evaluate(request: Evaluate, *, progress: Progress) -> dict[str, Any]:
    """Measure a version over all classes, old and new apart, and report as the command does."""
    store = Store.open(request.store)
    manifest = _chosen(store, request)
    known, strangers = _read_known(request, manifest, progress), None
    if request.unknown_data is not None:
        strangers = _read_strangers(request.unknown_data, request, manifest, progress)
    network = load_network(store.read_shard, manifest).to(choose_device(request.device))
    doubt = load_doubt(store.read_shard, manifest)
    cache = EmbeddingCache(
        network,
        reader_of(network, Lineage.of(network)),
        preprocessing=manifest.preprocessing,
        folder=request.tokens if manifest.spec.is_pretrained else None,
    )
    token_NW, logits_NC = _read_out(network, known, cache, progress)
    judged = judged_by(logits_NC, known, retired=manifest.retired)
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
        "calibration": {
            "temperature": temperature,
            **errors,
            "chance": judged.chance_calibration_error(temperature=temperature),
        },
        "levels": measure_levels(judged, manifest.hierarchy, temperature=temperature),
        "unknown": tell_apart(
            _doubted(judged.logits_NC, token_NW, judged.classes, doubt=doubt),
            _read_doubted(network, strangers, manifest, cache, progress, doubt=doubt)
            if strangers
            else None,
            detector=manifest.unknown,
        ),
    }


def _doubted(
    logits_NC: Floats, token_NW: Floats, classes: Sequence[str], *, doubt: Doubt | None
) -> Doubted:
    return Doubted(
        scores_N=scores_of(logits_NC, token_NW, doubt=doubt),
        nearest=[classes[place] for place in logits_NC.argmax(axis=1)],
    )


def _read_doubted(
    network: Network,
    images: LabelledImages,
    manifest: Manifest,
    cache: EmbeddingCache,
    progress: Progress,
    *,
    doubt: Doubt | None,
) -> Doubted:
    """Score images of no class by the classes that are answered."""
    token_NW, logits_NC = _read_out(network, images, cache, progress)
    answered_NC = logits_NC[:, list(manifest.places)]
    return _doubted(answered_NC, token_NW, manifest.classes, doubt=doubt)


def _read_out(
    network: Network, images: LabelledImages, cache: EmbeddingCache, progress: Progress
) -> tuple[Floats, Floats]:
    """Compute the oldest slice of the token, and the logits, in one pass over the images."""
    with progress.phase("reading embeddings", total=len(images)) as phase:
        found_NW = cache.embeddings(images, advance=phase.advance)
    cache.save()
    with torch.inference_mode():
        token = torch.from_numpy(found_NW).to(network.device)
        logits_NC: Floats = network.classify([token]).cpu().numpy()
    return found_NW[:, : network.spec.doubt_width], logits_NC


def _read_known(request: Evaluate, manifest: Manifest, progress: Progress) -> LabelledImages:
    listing = list_judged(request.data, setting="data").spelt_as(manifest.spec.classes)
    refuse_unknown_classes(listing, manifest.classes, setting="data")
    images = _read(listing, request, manifest, progress, setting="data")
    return images.among(manifest.spec.classes)


def _read_strangers(
    folder: Path, request: Evaluate, manifest: Manifest, progress: Progress
) -> LabelledImages:
    listing = list_strangers(folder, setting="unknown_data").spelt_as(manifest.spec.classes)
    refuse_familiar_classes(listing, manifest.spec.classes, setting="unknown_data")
    return _read(listing, request, manifest, progress, setting="unknown_data")


def _read(
    listing: Listing, request: Evaluate, manifest: Manifest, progress: Progress, *, setting: str
) -> LabelledImages:
    note_ignored(listing, progress)
    images = read_images(
        listing, preprocessing=manifest.preprocessing, skip_bad=request.skip_bad, progress=progress
    )
    refuse_no_images(images, listing, setting=setting, to="judge by")
    return images


def _chosen(store: Store, request: Evaluate) -> Manifest:
    if request.version is not None:
        return store.manifest(request.version)
    head = store.head(request.channel)
    if head is None:
        raise ChannelNotFound(f"channel {request.channel} names no version; give `version=N`")
    return store.resolve(head)
