"""Choose the images to keep: a held-out share that is never trained on, exemplars by herding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from model_store.codec import encode_images
from model_store.records.manifest import ClassImages, Preprocessing, ShardKind, ShardRef
from model_store.store.shard import check_shard, decode_images, shard_ref
from trainer.data.folders import LabelledImages
from trainer.data.pictures import Pictures, StoredImage, in_threads

_HELD_OUT_SHARES = (0.1, 0.2)
"""The share of a class's images that is held out, and the share where too few would be."""
_ENOUGH_HELD_OUT = 200
"""Held-out images by which the gate notices nine of ten falls of five points; see ADR 49."""
_HELD_OUT_BOUNDS = (2, 20)
_FEWEST_FOR_HELD_OUT = 10
_MOST_TOO_MANY = 4
"""By how many images the last group may be too large for what is to be held out."""
_KEPT_AS = {"memory": "exemplar", "held-out": "held-out image"}
"""The name that people are told of an image that the store keeps: its file is gone."""


def held_out_count(images: int, *, share: float = _HELD_OUT_SHARES[0]) -> int:
    """Return how many of a class's images are held out."""
    if images < _FEWEST_FOR_HELD_OUT:
        return 0
    low, high = _HELD_OUT_BOUNDS
    return min(max(round(images * share), low), high)


def held_out_share(images_by_class: Mapping[str, int], *, already: int) -> float:
    """Choose the share to hold out: more than the least where all classes together have too few
    images to judge by, and no more than that takes."""
    least, most = _HELD_OUT_SHARES
    usual = sum(held_out_count(images) for images in images_by_class.values())
    lacking = _ENOUGH_HELD_OUT - already - usual
    if lacking <= 0 or not usual:
        return least
    return min(most, least * (1 + lacking / usual))


def set_aside(
    images: LabelledImages,
    *,
    seed: int,
    groups_N: NDArray[np.int64] | None = None,
    already: Mapping[str, int] | None = None,
) -> tuple[LabelledImages, LabelledImages]:
    """Split images into those for training and those held out, the same for the same seed.

    Images of one of the `groups_N` stay together; None: each is a group. `already` counts the
    images of a class that were held out before: a class has a limit in all.
    """
    draw = np.random.default_rng(seed)
    before = already or {}
    share = held_out_share(images.images_by_class, already=sum(before.values()))
    groups = np.arange(len(images)) if groups_N is None else groups_N
    held: list[int] = []
    for name in images.classes:
        rows = images.rows_of(name)
        room = max(0, _HELD_OUT_BOUNDS[1] - before.get(name, 0))
        count = min(held_out_count(len(rows), share=share), room)
        held += _whole_groups(draw.permutation(rows), groups, count=count)
    chosen = np.zeros(len(images), dtype=bool)
    chosen[held] = True
    return images.take(np.flatnonzero(~chosen)), images.take(np.flatnonzero(chosen))


def _whole_groups(rows: NDArray[np.int64], groups: NDArray[np.int64], *, count: int) -> list[int]:
    """Take groups in the order of these rows, until they have `count` images.

    A group that is too large, or would leave fewer than half of the rows, is passed over. Where
    none is left, groups are parted: a version that is judged by twins of what it learnt from is
    still better than one that is not judged.
    """
    held: list[int] = []
    for group in dict.fromkeys(groups[rows].tolist()):
        if len(held) >= count:
            break
        members = rows[groups[rows] == group].tolist()
        if len(held) + len(members) <= max(count + _MOST_TOO_MANY, 1) and (
            2 * (len(held) + len(members)) <= len(rows)
        ):
            held += members
    return held or rows[:count].tolist()


def herding_order(features_ND: NDArray[np.float32], *, count: int) -> list[int]:
    """Order by iCaRL: each next exemplar keeps the exemplars' mean closest to the class mean.

    Any prefix of the order is the best buffer of its size by this rule.
    """
    features = features_ND.astype(np.float64)
    features /= np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    mean = features.mean(axis=0)
    mean /= max(float(np.linalg.norm(mean)), 1e-12)
    chosen: list[int] = []
    total = np.zeros_like(mean)
    free = np.ones(len(features), dtype=bool)
    for size in range(1, min(count, len(features)) + 1):
        distance = np.linalg.norm(mean - (total + features) / size, axis=1)
        best = int(np.where(free, distance, np.inf).argmin())
        chosen.append(best)
        free[best] = False
        total += features[best]
    return chosen


def keep(
    images: LabelledImages, *, kind: ShardKind, rows_by_class: Mapping[str, Sequence[int]]
) -> tuple[tuple[ClassImages, ...], dict[str, bytes]]:
    """Encode one shard of PNGs a class. Return manifest entries, and bytes by digest."""
    entries, shards = [], {}
    for name, rows in rows_by_class.items():
        if not len(rows):
            continue
        pictures = images.pictures.take(np.array(rows, dtype=np.int64))
        data = encode_images(list(in_threads(pictures.encoded, len(rows))))
        ref = shard_ref(kind, data)
        shards[ref.sha256] = data
        groups = numbered([images.groups[row] for row in rows])
        entries.append(ClassImages(class_name=name, shard=ref, count=len(rows), groups=groups))
    return tuple(entries), shards


def numbered(groups: Sequence[str]) -> tuple[int, ...]:
    """Number the groups of images as a manifest has them: nothing where all are alone."""
    places = {group: place for place, group in reversed([*enumerate(groups)]) if group}
    found = tuple(places.get(group, place) for place, group in enumerate(groups))
    return found if len(set(found)) < len(found) else ()


def merged(old: Sequence[ClassImages], new: Sequence[ClassImages]) -> tuple[ClassImages, ...]:
    """Merge entries, one a class: a new one replaces an old one, or follows all of them."""
    by_class = {entry.class_name: entry for entry in old}
    by_class |= {entry.class_name: entry for entry in new}
    return tuple(by_class.values())


def shrink(entries: Sequence[ClassImages], *, quota: int) -> tuple[ClassImages, ...]:
    """Keep fewer images of the same shards. A class that keeps none has no entry."""
    return tuple(entry.first(quota) for entry in entries if quota)


def recall(
    entries: Sequence[ClassImages],
    *,
    classes: tuple[str, ...],
    read: Callable[[ShardRef], bytes],
    preprocessing: Preprocessing,
) -> LabelledImages:
    """Read the images of `entries` from the store, and label them among `classes`. They are
    decoded when their pixels are asked for."""
    stored: list[StoredImage] = []
    labels: list[int] = []
    names: list[str] = []
    groups: list[str] = []
    for entry in entries:
        data = read(entry.shard)
        check_shard(entry.shard, data, expected=None)
        images = decode_images(data, count=entry.count)
        stored += [StoredImage(image, preprocessing) for image in images]
        labels += [classes.index(entry.class_name)] * len(images)
        kind = _KEPT_AS[entry.shard.kind]
        groups += [f"{kind} group {group}" for group in entry.groups] or [""] * len(images)
        names += [f"{kind} {number} of {entry.class_name}" for number in range(1, len(images) + 1)]
    return LabelledImages(
        classes=classes,
        pixels_NHWC=Pictures(stored, side=preprocessing.image_size),
        labels_N=np.array(labels, dtype=np.int64),
        names=names,
        groups=groups,
    )
