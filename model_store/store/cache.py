"""Keep shards of a distant store in a local folder: named by digest, bounded in size.

Every load hashes the bytes again, so a damaged cache costs a download and nothing else. Images
(memory, held-out) are never kept: `dne-store forget` could not reach them here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from model_store.errors import NotPrivate, ShardCorrupt, WrongUsage
from model_store.host.private import READ_FLAGS, private_folder, read_private, replace_file
from model_store.records.manifest import ShardRef
from model_store.store.shard import check_digest

_DEFAULT_BYTES = 8 << 30
_KEPT_KINDS = ("expert", "classifier")

log = logging.getLogger("model_store.cache")

# Only names that this cache writes: the folder may hold other files too.
_OWN_NAME = re.compile(r"[0-9a-f]{64}|tmp-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCache:
    """Files named by SHA-256 in one folder, which any number of processes may share."""

    root: Path
    max_bytes: int

    def read(self, ref: ShardRef, *, fetch: Callable[[ShardRef], bytes]) -> bytes:
        """Read a shard from the cache or through `fetch`; either way its bytes fit `ref`."""
        if ref.kind not in _KEPT_KINDS or ref.bytes > self.max_bytes:
            return fetch(ref)
        data = self._find(ref)
        if data is None:
            data = fetch(ref)
            self._keep(ref, data)
        return data

    def _find(self, ref: ShardRef) -> bytes | None:
        path = self.root / ref.sha256
        try:
            data = _read_exactly(path, ref.bytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("the cached shard %s cannot be read: %s", path, error.strerror)
            return None
        try:
            check_digest(ref, data)
        except ShardCorrupt:
            log.warning("the cached shard %s is damaged and is fetched again", path)
            return None  # the fetched bytes take its place
        return data

    def _keep(self, ref: ShardRef, data: bytes) -> None:
        try:
            if not self.root.exists():
                private_folder(self.root)
            self._make_room(ref.bytes)
            replace_file(self.root / ref.sha256, data)
        except OSError as error:
            log.warning("shard %s is not cached in %s: %s", ref.sha256, self.root, error.strerror)

    def _make_room(self, wanted_bytes: int) -> None:
        """Remove the shards that were used longest ago. Unfinished files of killed processes count
        too; files that this cache did not make neither count nor go."""
        held: list[tuple[float, int, str]] = []
        with os.scandir(self.root) as items:
            for item in items:
                if not _OWN_NAME.fullmatch(item.name):
                    continue
                with suppress(FileNotFoundError):  # another process made room, too
                    status = item.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        held.append((status.st_mtime, status.st_size, item.path))
        total = sum(size for _, size, _ in held)
        for _, size, path in sorted(held):
            if total + wanted_bytes <= self.max_bytes:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size


def shard_cache(location: str) -> ShardCache | None:
    """Make the cache for the store at `location`; None for a directory, which is near already,
    and where DNE_CACHE_BYTES is 0."""
    if "://" not in location:
        return None
    max_bytes = _max_bytes(os.environ.get("DNE_CACHE_BYTES") or str(_DEFAULT_BYTES))
    return ShardCache(root=cache_folder(), max_bytes=max_bytes) if max_bytes else None


def cache_folder() -> Path:
    """Return the folder for everything that this software can make or fetch again."""
    if given := os.environ.get("DNE_CACHE"):
        return Path(given)
    if above := os.environ.get("XDG_CACHE_HOME"):
        return Path(above, "dne-serve")
    return Path(os.path.expanduser("~"), ".cache", "dne-serve")


RUNS = ("tokens", "checkpoints")
"""The folders of what training runs keep on this machine: it follows from images."""
_REMOVALS = "removals.json"
"""The removals that this machine has heard of."""
_MAX_NOTE_BYTES = 1 << 26


def runs_folder(kind: str, location: str) -> Path:
    """Return the folder for what the runs on one store keep, so that `forget` finds it."""
    place = location if "://" in location else str(Path(location).resolve())
    which = hashlib.sha256(place.encode(errors="surrogateescape"))
    return cache_folder() / kind / which.hexdigest()[:16]


def default_checkpoint_folder(*, store: str, data: Path) -> Path:
    """Return the default folder for the checkpoints of a store and a data folder."""
    which = hashlib.sha256(str(data.resolve()).encode(errors="surrogateescape"))
    return runs_folder("checkpoints", store) / which.hexdigest()[:16]


def tokens_folder(store: str) -> Path:
    """Return the folder for the tokens of images on experts of a store."""
    return runs_folder("tokens", store)


def drop_runs(location: str) -> tuple[int, tuple[str, ...]]:
    """Delete what runs on a store have kept on this machine, for this user. Files in the places of
    older software go too, for they do not tell their store.

    Return the number of files that are gone, and the paths that could not be deleted.
    """
    files = [path for kind in RUNS for path in runs_folder(kind, location).rglob("*")]
    files += (cache_folder() / "tokens").glob("*.tokens")
    files += (cache_folder() / "checkpoints").glob("*/*.*")
    files += (cache_folder() / "summaries").glob("*")  # rows of `dne-store list` name classes
    gone, left = 0, []
    for path in {path for path in files if path.is_symlink() or not path.is_dir()}:
        try:
            path.unlink()
            gone += 1
        except FileNotFoundError:
            continue
        except OSError as error:
            left.append(f"{path} ({error.strerror})")
    return gone, tuple(sorted(left))


def heed_removals(location: str, removals: Collection[str]) -> int:
    """Drop what runs have kept on this machine where a removal from the store is new here, and
    return the number of files that are gone. `removals`: the names of all marks in the store."""
    note = runs_folder("tokens", location) / _REMOVALS
    try:
        known = set(json.loads(read_private(note, max_bytes=_MAX_NOTE_BYTES)))
    except (OSError, ValueError, TypeError, NotPrivate):
        known = set()
    if not set(removals) - known:
        return 0
    gone, _ = drop_runs(location)
    try:
        replace_file(private_folder(note.parent) / note.name, json.dumps(list(removals)).encode())
    except (OSError, NotPrivate) as error:
        log.warning("%s cannot be written: %s", note, error)
    return gone


def _max_bytes(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise WrongUsage(f"DNE_CACHE_BYTES is {text!r}, which is not a number of bytes")
    return int(text)


def _read_exactly(path: Path, size: int) -> bytes:
    """Read a file. One byte more than `size` is enough to show that it does not fit."""
    file = os.open(path, READ_FLAGS)
    with open(file, "rb") as reader:
        data = reader.read(size + 1) if stat.S_ISREG(os.fstat(file).st_mode) else b""
        os.utime(file)  # it was of use: others go first
    return data
