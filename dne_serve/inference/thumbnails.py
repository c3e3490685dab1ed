"""Read images that a version keeps, memory and held-out, and write them anew as small pictures.

The pixels are those of the shards: forgetting a class takes its pictures away. Nothing is kept in
memory or read from a cache, so that no forgotten picture is ever shown.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

from model_store.codec import decode_images
from model_store.preprocess import read_picture
from model_store.records.inbox import MediaType
from model_store.records.manifest import ClassImages
from model_store.store.shard import check_shard
from model_store.store.store import Store

MAX_SIDE = 96
MAX_PIXELS = 4096 * 4096
"""The largest image that a network takes; the store keeps images at the network's size."""
LOSSLESS_SIDE = 64
QUALITY = 85


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumbnail:
    data: bytes
    type: MediaType

    @classmethod
    def of(cls, image: bytes) -> Thumbnail:
        """Scale an image down. Raise ImageRejected where it cannot be decoded."""
        picture = read_picture(image, max_side=MAX_SIDE, max_pixels=MAX_PIXELS)
        written = io.BytesIO()
        if max(picture.size) <= LOSSLESS_SIDE:  # JPEG would change it visibly and save nothing
            picture.save(written, format="PNG")
            return cls(data=written.getvalue(), type="image/png")
        picture.save(written, format="JPEG", quality=QUALITY)
        return cls(data=written.getvalue(), type="image/jpeg")


def read_kept(store: Store, entry: ClassImages) -> list[bytes]:
    """Read the images of a class from the store itself. Raise ShardForgotten where they were
    forgotten."""
    data = store.read_stored_shard(entry.shard)
    check_shard(entry.shard, data, expected=None)
    return decode_images(data, count=entry.count)
