"""Show single held-out images of a version as small pictures."""

from __future__ import annotations

from dne_serve.errors import NotOffered
from dne_serve.inference.thumbnails import Thumbnail, read_kept
from dne_serve.reports.schemas import ReportPicture
from model_store.errors import ImageRejected, ShardForgotten
from model_store.records.manifest import ClassImages, Manifest
from model_store.store.store import Store


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
        images = read_kept(store, entry)
    except ShardForgotten as error:
        raise NotOffered("the pictures of that class were forgotten") from error
    try:
        return Thumbnail.of(images[chosen.image])
    except ImageRejected as error:
        raise NotOffered("that picture cannot be decoded") from error


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
