"""Keep the embeddings of images by digest, so that no image passes through the same experts twice.

A folder has a file for each lineage of experts, named by a digest of weights and shapes. It has no
pictures: a seal, the time at which it was begun, and then safetensors. A file without our seal is
not used, nor one with values that are not numbers. A random sample of the embeddings that are used
is computed again from pixels; one that differs discards the file. See ADR 88.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor

from model_store.errors import NotPrivate
from model_store.host.private import (
    SEAL_BYTES,
    is_sealed,
    private_folder,
    read_private,
    replace_file,
    seal,
)
from model_store.network.network import Network
from model_store.preprocess import normalise
from model_store.records.manifest import Preprocessing
from model_store.store.shard import read_layout
from trainer.data.folders import LabelledImages
from trainer.data.pictures import Pictures, Pixels, StoredImage, pixels_digest

BATCH = 16
"""Images in a pass: more are hardly faster on a processor, and a bar would stand still."""

Floats = NDArray[np.float32]


def in_batches(
    network: Network,
    pixels_NHWC: NDArray[np.uint8],
    read: Callable[[Tensor], Tensor],
    *,
    preprocessing: Preprocessing,
    batch_size: int = BATCH,
    advance: Callable[[int], None] | None = None,
) -> Floats:
    """Apply `read` to all images in batches, without gradients: one row an image.

    `advance` is told the size of each batch that is done.
    """
    rows = []
    with torch.inference_mode():
        for start in range(0, len(pixels_NHWC), batch_size):
            batch = normalise(pixels_NHWC[start : start + batch_size], preprocessing)
            rows.append(read(torch.from_numpy(batch).to(network.device)).cpu().numpy())
            if advance is not None:
                advance(len(batch))
    return np.concatenate(rows) if rows else np.zeros((0, 1), dtype=np.float32)


MAX_BYTES = 1 << 30
"""Bytes of all files of a folder; those that were not used for longest go first."""
MAX_FILE_BYTES = 1 << 28
_DIGEST_BYTES = 32
TIME_BYTES = 8
MAX_AGE_S = 30 * 24 * 3600
"""Embeddings of pictures that were forgotten on another machine are gone after this time."""
_SAMPLE_LEAST, _SAMPLE_SHARE = 4, 32
"""Of the embeddings that a file gives at once, one in 32 is computed again, and at least one; at
least 4 of all that it gives."""
TOLERANCE = 0.02
"""Distance of a kept embedding from the computed one, relative to its length. Other batches and
processors make differences of 1e-5."""

log = logging.getLogger("dne_train")


def drop_embeddings(folder: Path) -> None:
    """Delete the embeddings of a folder, where pictures behind some of them are gone."""
    for path in [*folder.glob("*.tokens"), *folder.glob("tmp-*")]:
        path.unlink(missing_ok=True)


class EmbeddingCache:
    """The embeddings of a network's final experts: those in memory, and those of earlier runs."""

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
        """`read` computes embeddings by the experts. Without a folder none are kept."""
        self._network, self._read, self._preprocessing = network, read, preprocessing
        self._batch_size, self._folder, self._precision = batch_size, folder, precision
        self._width = network.spec.token_width
        self._path = None
        kept = _Kept(embeddings={}, begun_s=int(time.time()))
        if folder is not None:
            try:
                self._path = (
                    private_folder(folder) / f"{_key(network, preprocessing, precision)}.tokens"
                )
                kept = _read(self._path, width=self._width) or kept
            except (OSError, NotPrivate) as error:
                self._path = None
                log.warning("embeddings of images are computed anew, and not kept: %s", error)
        self._known, self._begun_s = kept.embeddings, kept.begun_s
        self._from_file = frozenset(self._known)
        # Reduced precisions say how often answers agree, and no classifier is fitted to them. Their
        # embeddings depend on the batch, and a session for a sample would take seconds.
        self._unproved = set(self._known) if precision == "fp32" else set()
        self._sampled = 0
        self._saved = len(self._known)

    def embeddings(
        self, images: LabelledImages, *, advance: Callable[[int], None] | None = None
    ) -> Floats:
        """Return [N, W], the embedding of each image as it is, without augmentation.

        `advance` is told how many images more are done, while others are computed.
        """
        names = images.pictures.digests()
        self._prove(images.pictures, names)
        missing = [row for row, name in enumerate(names) if name not in self._known]
        if advance is not None and len(missing) < len(names):
            advance(len(names) - len(missing))
        if missing:
            self._read_missing(images.pictures.take(np.array(missing, dtype=np.int64)), advance)
        found = np.zeros((len(images), self._width), dtype=np.float32)
        for row, name in enumerate(names):
            found[row] = self._known[name]
        return found

    def narrowed(self, network: Network) -> EmbeddingCache:
        """Keep the embeddings of a network that reads the first of these channels only."""
        width = network.spec.token_width
        narrow = EmbeddingCache(
            network,
            lambda images_BCHW: self._read(images_BCHW)[:, :width],
            preprocessing=self._preprocessing,
            folder=self._folder,
            precision=self._precision,
            batch_size=self._batch_size,
        )
        for name, embedding_W in self._known.items():
            narrow._known[name] = np.ascontiguousarray(embedding_W[:width])
        # Those of this cache need no second proof.
        narrow._unproved = (narrow._unproved - self._known.keys()) | self._unproved
        narrow._from_file |= self._from_file
        narrow._sampled = self._sampled
        narrow.save()
        return narrow

    def prove(self, images: LabelledImages) -> None:
        """Compute a sample again of the embeddings that the file has of these images."""
        self._prove(images.pictures, images.pictures.digests())

    def _prove(self, pictures: Pictures, names: Sequence[bytes]) -> None:
        rows = [row for row, name in enumerate(names) if name in self._unproved]
        if not rows:
            return
        count = max(1, _SAMPLE_LEAST - self._sampled, len(rows) // _SAMPLE_SHARE)
        count = min(len(rows), count)
        self._sampled += count
        chosen = secrets.SystemRandom().sample(rows, count)
        computed_NW = self._compute(pictures.take(np.array(chosen, dtype=np.int64)).pixels_NHWC)
        kept_NW = np.stack([self._known[names[row]] for row in chosen])
        distance_N = np.linalg.norm(kept_NW - computed_NW, axis=1)
        if (distance_N > TOLERANCE * np.linalg.norm(computed_NW, axis=1)).any():
            self._discard()
        self._unproved.difference_update(names[row] for row in rows)

    def _discard(self) -> None:
        """Drop everything that came from the file, and the file."""
        log.warning(
            "the embeddings in %s do not follow from the images: the file is removed, and they are "
            "computed anew",
            self._path,
        )
        self._known = {
            name: one for name, one in self._known.items() if name not in self._from_file
        }
        self._unproved.clear()
        self._saved = -1
        if self._path is not None:
            with suppress(OSError):  # a file that stays is discarded again
                self._path.unlink(missing_ok=True)

    def also_name(self, images: LabelledImages, stored: Sequence[StoredImage]) -> None:
        """Keep known embeddings under the names, too, that the images have in the store."""
        for name, one in zip(images.pictures.digests(), stored, strict=True):
            if name in self._known:
                self._known[one.digest] = self._known[name]

    def _read_missing(self, pictures: Pictures, advance: Callable[[int], None] | None) -> None:
        """Decode images, and compute the embeddings of those whose pixels are new too."""
        pixels_NHWC = pictures.pixels_NHWC
        digests = [pixels_digest(pixels) for pixels in pixels_NHWC]
        self._prove(pictures, digests)
        new = [row for row, digest in enumerate(digests) if digest not in self._known]
        if advance is not None and len(new) < len(digests):
            advance(len(digests) - len(new))
        computed = self._compute(pixels_NHWC[new], advance)
        for row, embedding_W in zip(new, computed, strict=True):
            self._known[digests[row]] = embedding_W
        for name, digest in zip(pictures.digests(), digests, strict=True):
            self._known[name] = self._known[digest]

    def _compute(self, pixels_NHWC: Pixels, advance: Callable[[int], None] | None = None) -> Floats:
        return in_batches(
            self._network,
            pixels_NHWC,
            self._read,
            preprocessing=self._preprocessing,
            batch_size=self._batch_size,
            advance=advance,
        )

    def know(self, images: LabelledImages, embeddings_NW: Floats) -> None:
        """Take up embeddings of images that another process has computed."""
        for name, embedding_W in zip(images.pictures.digests(), embeddings_NW, strict=True):
            self._known.setdefault(name, embedding_W)

    def save(self) -> None:
        """Write new embeddings to the file. A run goes on if the cache cannot be written."""
        if self._path is None or len(self._known) == self._saved:
            return
        with suppress(OSError, NotPrivate):
            _write(self._path, _Kept(embeddings=self._known, begun_s=self._begun_s))
            self._saved = len(self._known)


def _key(network: Network, preprocessing: Preprocessing, precision: str) -> str:
    """Name a file by all that embeddings follow from: weights and shapes."""
    geometry = replace(network.spec, tasks=())
    said = f"{preprocessing.model_dump_json()} {precision} {geometry} {network.spec.experts}"
    digest = hashlib.sha256(said.encode())
    for expert in network.experts:
        for tensor in expert.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The contents of a file: embeddings by name, and the time at which it was begun."""

    embeddings: dict[bytes, Floats]
    begun_s: int


def _read(path: Path, *, width: int) -> _Kept | None:
    """Read a file of ours. Return None where there is none; remove one that is not to be used."""
    try:
        content = read_private(path, max_bytes=MAX_FILE_BYTES)
        kept = _parse(path.name, content, width=width)
    except FileNotFoundError:
        return None
    except (NotPrivate, ValueError, KeyError) as error:
        log.warning("embeddings of images are computed anew: %s: %s", path, error)
        kept = None
    if kept is None:
        path.unlink(missing_ok=True)
    else:
        os.utime(path)
    return kept


def _parse(name: str, content: bytes, *, width: int) -> _Kept | None:
    """Parse a file. Return None for one whose time is over, and raise ValueError or KeyError for
    one that is damaged or was written by another user."""
    told, sealed = content[:SEAL_BYTES], content[SEAL_BYTES:]
    if not is_sealed(name, sealed, by=told):
        raise ValueError("it is damaged, or was not written by this user")
    begun_s = int.from_bytes(sealed[:TIME_BYTES], "big")
    if abs(time.time() - begun_s) > MAX_AGE_S:
        return None
    data = sealed[TIME_BYTES:]
    layout = read_layout(data)
    digests, embeddings = layout["digests"], layout["tokens"]
    count = embeddings.shape[0] if embeddings.shape else -1
    fits = (digests.dtype, digests.shape) == ("U8", (count, _DIGEST_BYTES))
    if not fits or (embeddings.dtype, embeddings.shape) != ("F32", (count, width)):
        raise ValueError("it has other shapes")
    embeddings_NW = np.frombuffer(data, dtype="<f4", count=count * width, offset=embeddings.start)
    if not np.isfinite(embeddings_NW).all():
        raise ValueError("it has embeddings that are not numbers")
    names = [
        data[digests.start + _DIGEST_BYTES * row : digests.start + _DIGEST_BYTES * (row + 1)]
        for row in range(count)
    ]
    rows_NW = embeddings_NW.reshape(count, width).astype(np.float32)
    return _Kept(embeddings=dict(zip(names, rows_NW, strict=True)), begun_s=begun_s)


def _write(path: Path, kept: _Kept) -> None:
    """Write the newest embeddings that fit, and make room for them."""
    finite = {name: one for name, one in kept.embeddings.items() if np.isfinite(one).all()}
    if not finite:
        return
    width = len(next(iter(finite.values())))
    most = MAX_FILE_BYTES // (_DIGEST_BYTES + 4 * width + 1)
    newest = dict(list(finite.items())[-most:])
    data = kept.begun_s.to_bytes(TIME_BYTES, "big") + save(
        {
            "digests": np.frombuffer(b"".join(newest), dtype=np.uint8).reshape(-1, _DIGEST_BYTES),
            "tokens": np.stack(list(newest.values())),
        }
    )
    replace_file(private_folder(path.parent) / path.name, seal(path.name, data) + data)
    _make_room(path.parent.parent)


def _make_room(folder: Path) -> None:
    """Delete the files of all stores that were not used for longest, and what killed runs left."""
    files = [*folder.glob("*/*.tokens"), *folder.glob("*/tmp-*")]
    total = 0
    for file in sorted(files, key=lambda one: one.stat().st_mtime, reverse=True):
        total += file.stat().st_size
        if total > MAX_BYTES or time.time() - file.stat().st_mtime > MAX_AGE_S:
            file.unlink(missing_ok=True)
