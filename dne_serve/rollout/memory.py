"""Check that a version fits into memory before a byte of it is read, and return freed memory to
the system. A server that runs out of memory is killed, and its served version with it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from dne_serve.errors import NotEnoughMemory
from model_store.records.manifest import Manifest
from model_store.spec import ExpertRun, NetworkSpec

COPIES = 3
"""Copies of a shard at the worst moment: its bytes, its tensors, and the engine's form of them."""
_CGROUP = Path("/sys/fs/cgroup")


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
        there = {ref.sha256 for manifest in residents for ref in manifest.model_shards}
        new = {ref.sha256: ref.bytes for ref in manifest.model_shards if ref.sha256 not in there}
        weights, available = COPIES * sum(new.values()), self._available()
        specs = {manifest.spec for manifest in residents}  # many versions have the same
        held = max((self._pass_bytes(spec) for spec in specs), default=0)
        passing = max(0, self._pass_bytes(manifest.spec) - held)
        if available is not None and weights + passing > available:
            raise NotEnoughMemory(
                f"version {manifest.version} needs about {_mib(weights)} of memory to load and "
                f"{_mib(passing)} more for a batch of images, and {_mib(available)} are free; a "
                "smaller --max-batch needs less"
            )


def available_bytes() -> int | None:
    """Return the free bytes of this machine or its container; None if neither is known."""
    left = [free_bytes for free_bytes in (_of_machine(), _of_cgroup()) if free_bytes is not None]
    return min(left, default=None)


def _of_machine(path: Path = Path("/proc/meminfo")) -> int | None:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _of_cgroup(folder: Path = _CGROUP) -> int | None:
    """Return the container's limit minus the memory it cannot drop. "max" means no limit."""
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


_NUMBER_BYTES = 4
MARGIN = 1.25
"""Covers what the arithmetic leaves out: buffers of threads, numbers in another precision."""


def pass_bytes(spec: NetworkSpec, *, batch: int, backend: str, workers: int = 1) -> int:
    """Bound the bytes that `workers` simultaneous passes over `batch` images each take at most."""
    count = _in_onnxruntime if backend == "onnx" else _in_torch
    return int(MARGIN * _NUMBER_BYTES * workers * count(spec, batch=batch))


def scratch_numbers(spec: NetworkSpec, *, rows: int) -> int:
    """Count the numbers of the workspace's layout: the activations that a block keeps for younger
    experts, and the task attention of one run after the other."""
    narrow, wide = spec.head_width, spec.hidden_width
    heads = sum(expert.heads for expert in spec.experts)
    mixing = []
    for run in spec.runs()[1:]:
        own = len(run.experts) * run.heads
        reader = run.heads * (run.end * (narrow + 1) + wide)
        asking = own * (wide + 2 * run.end + narrow)
        mixing.append(asking + max(reader, len(run.experts) * narrow))
    return rows * (heads * (narrow + wide) + max(mixing, default=0))


def _in_torch(spec: NetworkSpec, *, batch: int) -> int:
    rows = batch * spec.positions_of(0)
    attending = max(_attending(spec, run) for run in spec.runs()) + _backbone(spec)
    asking = max(len(run.experts) * run.heads for run in spec.runs()) * spec.hidden_width**2
    return (
        _images(spec, batch=batch)
        + scratch_numbers(spec, rows=rows)
        + rows * (spec.token_width - spec.readout_width + attending)
        + _reading_blocks(spec, batch=batch)
        + asking
    )


def _in_onnxruntime(spec: NetworkSpec, *, batch: int) -> int:
    """Count numbers in onnxruntime, whose attention keeps a map of all pairs of positions, before
    and after the softmax."""
    rows = batch * spec.positions_of(0)
    maps = max(
        2 * len(run.experts) * run.attention_heads * spec.positions_of(0) + _attending(spec, run)
        for run in spec.runs()
    )
    maps += _backbone(spec)
    heads = sum(expert.heads for expert in spec.experts)
    left = 3 * heads * (spec.head_width + spec.hidden_width)
    left += 2 * (spec.token_width - spec.readout_width)
    mixing = max((_reading(spec, run) for run in spec.runs()[1:]), default=0)
    return (
        _images(spec, batch=batch)
        + rows * (left + max(maps, mixing))
        + _reading_blocks(spec, batch=batch)
    )


def _reading_blocks(spec: NetworkSpec, *, batch: int) -> int:
    """Count the normalised rows of the earlier blocks that a readout names, and what is read of
    them, before and after it is joined."""
    blocks = len(spec.readout.blocks) if spec.readout else 0
    normed = blocks * batch * spec.positions_of(0) * spec.width_of(0)
    return normed + 2 * batch * spec.readout_width


def _backbone(spec: NetworkSpec) -> int:
    """Count the numbers a row that a backbone has beside those of a plain first expert: its block
    is computed outside the workspace, and queries and keys are turned into copies."""
    if spec.backbone is None:
        return 0
    hidden = spec.mlp_ratio * (4 if spec.backbone.activation == "swiglu" else 3)
    return (2 + hidden + 6) * spec.width_of(0)


def _images(spec: NetworkSpec, *, batch: int) -> int:
    """Count the images, and their patches as the rows of a matrix."""
    return 2 * batch * 3 * spec.image_size**2


def _attending(spec: NetworkSpec, run: ExpertRun) -> int:
    """Count the numbers a row of self-attention: normalised input, queries, keys and values, the
    mix in two orders, the sum, and the weights by which the token's heads read each position."""
    channels = len(run.experts) * run.heads * spec.head_width
    return 7 * channels + 2 * len(run.experts) * run.attention_heads


def _reading(spec: NetworkSpec, run: ExpertRun) -> int:
    """Count the numbers a row of a run's task attention, in a graph that keeps all of them."""
    own, narrow, wide = len(run.experts) * run.heads, spec.head_width, spec.hidden_width
    scaled = run.heads * run.end * (narrow + 1)
    return scaled + own * (3 * wide + 4 * run.end) + run.end * (wide + 2 * narrow)
