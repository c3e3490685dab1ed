"""List the held-out images that a report shows, and read them as small pictures.

The pixels are those of the shards: forgetting a class takes its pictures away. Nothing is kept in
memory or read from a cache, so no forgotten picture is ever shown.
"""

from __future__ import annotations

from model_store.codec import read_kept
from model_store.preprocess import Thumbnail
from model_store.records.manifest import ClassImages, Manifest
from model_store.report.record import ReportPicture
from model_store.store.store import Store


def list_pictures(store: Store, manifest: Manifest) -> tuple[list[ReportPicture], str]:
    """List the pictures that are still there, and say why others are not."""
    metrics = manifest.metrics
    if not metrics.shown:
        return [], _why_none(manifest)
    forgotten = store.forgotten()
    gone = {name for name, entry in _entries(manifest).items() if entry.shard.sha256 in forgotten}
    listed = [
        ReportPicture(
            number=number,
            label=shown.class_name,
            answer=shown.answer,
            before=shown.before,
            confidence=shown.confidence,
        )
        for number, shown in enumerate(metrics.shown)
        if shown.class_name not in gone
    ]
    lost = sorted({shown.class_name for shown in metrics.shown} & gone)
    return listed, f"The pictures of {', '.join(lost)} were forgotten." if lost else ""


def read_picture_of(store: Store, manifest: Manifest, number: int) -> Thumbnail:
    """Read one picture of the list and write it anew. Raise ShardForgotten, KeptTooLarge or
    ImageRejected where it cannot be shown."""
    shown = manifest.metrics.shown[number]
    images = read_kept(store.read_stored_shard, _entries(manifest)[shown.class_name])
    return Thumbnail.of(images[shown.image])


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
