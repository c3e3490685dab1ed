"""Show images that a version keeps as small pictures: held-out ones, and examples of a class.

The pixels are those of the shards: forgetting a class takes its pictures away. Nothing is kept in
memory or read from a cache, so that no forgotten picture is ever shown.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

from dne_serve.errors import NotOffered
from dne_serve.reports.schemas import ReportPicture
from model_store.codec import decode_images
from model_store.errors import ImageRejected, ShardForgotten
from model_store.preprocess import read_picture
from model_store.records.inbox import MediaType
from model_store.records.manifest import ClassImages, Manifest
from model_store.store.shard import check_shard
from model_store.store.store import Store

MAX_SIDE = 96
MAX_PIXELS = 4096 * 4096
"""The largest image that a network takes; the store keeps images at the network's size."""
LOSSLESS_SIDE = 64
QUALITY = 85
MAX_EXAMPLES = 4
MAX_EXAMPLE_BYTES = 64 << 20
"""A larger shard is not read for a few small pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumbnail:
    data: bytes
    type: MediaType


def list_pictures(store: Store, manifest: Manifest) -> tuple[list[ReportPicture], str]:
    """List the pictures that are still there, and say why others are not."""
    metrics, entries = manifest.metrics, _entries(manifest)
    if not metrics.shown:
        return [], _why_none(manifest)
    forgotten = store.forgotten()
    gone = [name for name, entry in entries.items() if entry.shard.sha256 in forgotten]
    found = [
        ReportPicture(
            number=number,
            label=one.class_name,
            answer=one.answer,
            before=one.before,
            confidence=one.confidence,
        )
        for number, one in enumerate(metrics.shown)
        if one.class_name not in gone
    ]
    lost = sorted({one.class_name for one in metrics.shown} & set(gone))
    return found, f"The pictures of {', '.join(lost)} were forgotten." if lost else ""


def read_thumbnail(store: Store, manifest: Manifest, number: int) -> Thumbnail:
    """Read one picture and write it anew. Raise NotOffered where it is not there any more."""
    shown = manifest.metrics.shown
    if number >= len(shown):
        raise NotOffered(f"the report of version {manifest.version} has no picture {number}")
    chosen = shown[number]
    entry = _entries(manifest)[chosen.class_name]
    try:
        images = _read_images(store, entry)
    except ShardForgotten as error:
        raise NotOffered("the pictures of that class were forgotten") from error
    try:
        return _written(images[chosen.image])
    except ImageRejected as error:
        raise NotOffered("that picture cannot be decoded") from error


def read_examples(store: Store, manifest: Manifest, label: str) -> tuple[list[Thumbnail], str]:
    """Read a few kept images of a class, and say why there are none. The trainer's memory holds the
    most typical ones first; without it the held-out images are shown."""
    if label not in manifest.classes:
        raise NotOffered(f"version {manifest.version} has no class {label[:200]!r}")
    kept = {one.class_name: one for one in (*manifest.held_out, *manifest.memory) if one.count}
    entry = kept.get(label)
    if entry is None:
        return [], "No image of this class is kept."
    if entry.shard.bytes > MAX_EXAMPLE_BYTES:
        return [], "The kept images of this class are too large to show."
    try:
        images = _read_images(store, entry)
    except ShardForgotten:
        return [], "The images of this class were forgotten."
    try:
        return [_written(one) for one in images[:MAX_EXAMPLES]], ""
    except ImageRejected:
        return [], "The kept images of this class cannot be decoded."


def _read_images(store: Store, entry: ClassImages) -> list[bytes]:
    data = store.read_stored_shard(entry.shard)
    check_shard(entry.shard, data, expected=None)
    return decode_images(data, count=entry.count)


def _written(image: bytes) -> Thumbnail:
    picture = read_picture(image, max_side=MAX_SIDE, max_pixels=MAX_PIXELS)
    written = io.BytesIO()
    if max(picture.size) <= LOSSLESS_SIDE:  # JPEG would change it visibly and save nothing
        picture.save(written, format="PNG")
        return Thumbnail(data=written.getvalue(), type="image/png")
    picture.save(written, format="JPEG", quality=QUALITY)
    return Thumbnail(data=written.getvalue(), type="image/jpeg")


def _entries(manifest: Manifest) -> dict[str, ClassImages]:
    return {entry.class_name: entry for entry in manifest.held_out}


def _why_none(manifest: Manifest) -> str:
    metrics = manifest.metrics
    if metrics.gate is None:
        return "No picture is shown: nothing was learnt in this version."
    if metrics.source == "validation":
        return "No picture was kept: this version was judged by images outside the store."
    if not manifest.held_out:
        return "No picture was kept: this store keeps none, or no image was held out."
    if metrics.run is None:
        return "No picture was noted: older software made this version."
    return "No picture to show: every held-out image was answered right, as before."
