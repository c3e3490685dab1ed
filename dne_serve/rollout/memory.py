"""Check that a version fits into memory before a byte of it is read, and return freed memory to
the system. A server that runs out of memory is killed, and its served version with it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from dne_serve.errors import NotEnoughMemory
from model_store.records.manifest import Manifest
from model_store.spec import NetworkSpec

COPIES = 3
"""Copies of a shard at the worst moment: its bytes, its tensors, and the engine's form of them."""
CGROUP = Path("/sys/fs/cgroup")


class MemoryCheck:
    """A check of free memory, made before a version is loaded."""

    def __init__(
        self,
        resident: Callable[[], Iterable[Manifest]],
        *,
        pass_bytes: Callable[[NetworkSpec], int] = lambda spec: 0,
        available: Callable[[], int | None] | None = None,
    ) -> None:
        """`resident`: the versions in memory, whose shards need not be loaded again. `pass_bytes`:
        the memory of a pass over the largest batch. Versions use this memory in turn, so only the
        excess over the versions in memory counts."""
        self._resident = resident
        self._pass_bytes = pass_bytes
        self._available = available or available_bytes

    def check(self, manifest: Manifest) -> None:
        residents = tuple(self._resident())
        there = {ref.sha256 for one in residents for ref in one.model_shards}
        new = {ref.sha256: ref.bytes for ref in manifest.model_shards if ref.sha256 not in there}
        weights, available = COPIES * sum(new.values()), self._available()
        held = max((self._pass_bytes(one.spec) for one in residents), default=0)
        passing = max(0, self._pass_bytes(manifest.spec) - held)
        if available is not None and weights + passing > available:
            raise NotEnoughMemory(
                f"version {manifest.version} needs about {_mib(weights)} of memory to load and "
                f"{_mib(passing)} more for a batch of images, and {_mib(available)} are free; a "
                "smaller --max-batch needs less"
            )


def available_bytes() -> int | None:
    """Return the free bytes of this machine or its container; None if neither is known."""
    left = [found for found in (_of_machine(), _of_cgroup()) if found is not None]
    return min(left, default=None)


def _of_machine(path: Path = Path("/proc/meminfo")) -> int | None:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _of_cgroup(folder: Path = CGROUP) -> int | None:
    """Return the container's limit minus the memory it cannot drop. "max" is no limit."""
    with suppress(OSError, ValueError):
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    return None


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def give_back() -> None:
    """Return freed pages to the system, if the C library can. It keeps pages between those in use,
    and they become many while versions come and go. Takes milliseconds and releases the GIL."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
