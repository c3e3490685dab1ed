"""Keep the tokens of images by digest, so that no image passes through the same experts twice.

In a folder there is a file for each lineage of experts, named by a digest of weights and shapes. It
holds tokens and no pictures: the SHA-256 of the rest, and then safetensors. A file that was
damaged is not used.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save
from torch import Tensor

from model_store.network.network import Network
from model_store.records.manifest import Preprocessing
from model_store.store.cache import cache_folder
from model_store.store.shard import read_layout
from trainer.data.folders import LabelledImages
from trainer.data.pictures import Pictures, StoredImage, pixels_digest
from trainer.tokens.passes import BATCH, Floats, in_batches

MAX_BYTES = 1 << 30
"""Bytes of all files of a folder; those that were not used for longest go first."""
MAX_FILE_BYTES = 1 << 28
DIGEST_BYTES = 32


def default_folder() -> Path:
    return cache_folder() / "tokens"


class TokenCache:
    """The tokens of a network's final experts: those in memory, and those of earlier runs."""

    def __init__(
        self,
        network: Network,
        read: Callable[[Tensor], Tensor],
        *,
        preprocessing: Preprocessing,
        folder: Path | None,
        precision: str = "fp32",
        batch_size: int = BATCH,
    ) -> None:
        """`read` computes tokens by the experts of `network`. Without a folder there is no file."""
        self._network, self._read, self._preprocessing = network, read, preprocessing
        self._batch_size = batch_size
        self._width = network.spec.token_width
        self._known: dict[bytes, Floats] = {}
        self._path: Path | None = None
        if folder is not None:
            self._path = folder / f"{_key(network, preprocessing, precision)}.tokens"
            self._known = _read(self._path, width=self._width)
        self._saved = len(self._known)

    def tokens(
        self, images: LabelledImages, *, advance: Callable[[int], None] | None = None
    ) -> Floats:
        """Return [N, W], the token of each image as it is, without augmentation.

        `advance` is told how many images more are done, while others are computed.
        """
        names = images.pictures.digests()
        missing = [row for row, name in enumerate(names) if name not in self._known]
        if advance is not None and len(missing) < len(names):
            advance(len(names) - len(missing))
        if missing:
            self._read_missing(images.pictures.take(np.array(missing, dtype=np.int64)), advance)
        found = np.zeros((len(images), self._width), dtype=np.float32)
        for row, name in enumerate(names):
            found[row] = self._known[name]
        return found

    def also_name(self, images: LabelledImages, stored: Sequence[StoredImage]) -> None:
        """Keep tokens that are known under the names, too, that the images have in the store."""
        for name, one in zip(images.pictures.digests(), stored, strict=True):
            if name in self._known:
                self._known[one.digest] = self._known[name]

    def _read_missing(self, pictures: Pictures, advance: Callable[[int], None] | None) -> None:
        """Decode images, and compute the tokens of those whose pixels are new too."""
        pixels_NHWC = pictures.pixels_NHWC
        digests = [pixels_digest(pixels) for pixels in pixels_NHWC]
        new = [row for row, digest in enumerate(digests) if digest not in self._known]
        if advance is not None and len(new) < len(digests):
            advance(len(digests) - len(new))
        computed = in_batches(
            self._network,
            pixels_NHWC[new],
            self._read,
            preprocessing=self._preprocessing,
            batch_size=self._batch_size,
            advance=advance,
        )
        for row, token_W in zip(new, computed, strict=True):
            self._known[digests[row]] = token_W
        for name, digest in zip(pictures.digests(), digests, strict=True):
            self._known[name] = self._known[digest]

    def know(self, images: LabelledImages, tokens_NW: Floats) -> None:
        """Take up tokens of images that another process has computed."""
        for name, token_W in zip(images.pictures.digests(), tokens_NW, strict=True):
            self._known.setdefault(name, token_W)

    def save(self) -> None:
        """Write new tokens to the file. A cache that cannot be written is no reason to stop."""
        if self._path is None or len(self._known) == self._saved:
            return
        with suppress(OSError):
            _write(self._path, self._known)
            self._saved = len(self._known)


def _key(network: Network, preprocessing: Preprocessing, precision: str) -> str:
    """Name a file by all that tokens follow from: shapes too, for not every number is a weight."""
    geometry = replace(network.spec, tasks=())
    said = f"{preprocessing.model_dump_json()} {precision} {geometry} {network.spec.experts}"
    digest = hashlib.sha256(said.encode())
    for expert in network.experts:
        for tensor in expert.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _read(path: Path, *, width: int) -> dict[bytes, Floats]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return {}
        told, data = _split(path.read_bytes())
        if hashlib.sha256(data).digest() != told:
            return {}
        layout = read_layout(data)
        digests, tokens = layout["digests"], layout["tokens"]
    except (OSError, ValueError, KeyError):
        return {}
    count = tokens.shape[0] if tokens.shape else -1
    fits = (digests.dtype, digests.shape) == ("U8", (count, DIGEST_BYTES))
    if not fits or (tokens.dtype, tokens.shape) != ("F32", (count, width)):
        return {}
    with suppress(OSError):
        os.utime(path)
    names = [
        data[digests.start + DIGEST_BYTES * row : digests.start + DIGEST_BYTES * (row + 1)]
        for row in range(count)
    ]
    tokens_NW = np.frombuffer(data, dtype="<f4", count=count * width, offset=tokens.start)
    return dict(zip(names, tokens_NW.reshape(count, width).astype(np.float32), strict=True))


def _split(content: bytes) -> tuple[bytes, bytes]:
    return content[:DIGEST_BYTES], content[DIGEST_BYTES:]


def _write(path: Path, known: dict[bytes, Floats]) -> None:
    """Write the newest tokens that fit, and make room for them."""
    width = len(next(iter(known.values())))
    most = MAX_FILE_BYTES // (DIGEST_BYTES + 4 * width + 1)
    kept = dict(list(known.items())[-most:])
    data = save(
        {
            "digests": np.frombuffer(b"".join(kept), dtype=np.uint8).reshape(-1, DIGEST_BYTES),
            "tokens": np.stack(list(kept.values())),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named like a file of tokens: what a killed run leaves behind makes room in its turn.
    temporary = path.with_name(f"{uuid.uuid4().hex}.tokens")
    try:
        temporary.write_bytes(hashlib.sha256(data).digest() + data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _make_room(path.parent)


def _make_room(folder: Path) -> None:
    files = sorted(folder.glob("*.tokens"), key=lambda one: one.stat().st_mtime, reverse=True)
    total = 0
    for one in files:
        total += one.stat().st_size
        if total > MAX_BYTES:
            one.unlink(missing_ok=True)
