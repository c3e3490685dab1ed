"""Show a few kept images of a class, to compare an image with before it gets that label."""

from __future__ import annotations

from dne_serve.errors import NotOffered
from dne_serve.inference.thumbnails import Thumbnail, read_kept
from model_store.errors import ImageRejected, ShardForgotten
from model_store.records.manifest import Manifest
from model_store.store.store import Store

MAX_EXAMPLES = 4
MAX_SHARD_BYTES = 64 << 20
"""A larger shard is not read for a few small pictures."""


def read_examples(store: Store, manifest: Manifest, label: str) -> tuple[list[Thumbnail], str]:
    """Read a few kept images of a class, and say why there are none. The trainer's memory holds the
    most typical ones first; without it the held-out images are shown."""
    if label not in manifest.classes:
        raise NotOffered(f"version {manifest.version} has no class {label[:200]!r}")
    kept = {one.class_name: one for one in (*manifest.held_out, *manifest.memory) if one.count}
    entry = kept.get(label)
    if entry is None:
        return [], "No image of this class is kept."
    if entry.shard.bytes > MAX_SHARD_BYTES:
        return [], "The kept images of this class are too large to show."
    try:
        images = read_kept(store, entry)
    except ShardForgotten:
        return [], "The images of this class were forgotten."
    try:
        return [Thumbnail.of(one) for one in images[:MAX_EXAMPLES]], ""
    except ImageRejected:
        return [], "The kept images of this class cannot be decoded."
