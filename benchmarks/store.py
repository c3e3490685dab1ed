"""How fast a store in a directory is, beside the least that the same work can cost.

Publishing a delta is compared with a bare loop of the same writes, fsyncs and links; `verify`
with `sha256sum` on the same files; opening is counted in objects read, and a thousand stores that
borrow one backbone in bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import stat
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, at_least, at_most, print_figures
from model_store.backends.base import Objects
from model_store.backends.local import LocalDirectory
from model_store.layout import record_name, shard_name, version_name
from model_store.records.manifest import Manifest
from model_store.spec import ExpertSpec, NetworkSpec, TaskSpec
from model_store.store.shard import shard_ref
from model_store.store.store import Store
from tests.model_store import drafts
from tests.model_store.backends import MemoryObjects, WatchedObjects

DELTA_BYTES = 4 << 20
VERSIONS = 100
COUNTED = ("write", "fsync", "link")
BORROWERS = 1000
VIT_TI = NetworkSpec(
    image_size=224, patch_size=16, depth=12, head_width=64, mlp_ratio=4, token="in-sequence"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument("--rounds", type=int, default=15, help="how often each thing is timed")
    parser.add_argument("--folder", help="where to measure; a temporary folder by default")
    parser.add_argument("--only", choices=MEASURES, help="measure one thing")
    options = parser.parse_args()
    figures: list[Figure] = []
    measured: dict[str, float] = {}
    for name, measure in MEASURES.items():
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found, details = measure(Path(folder), rounds=options.rounds)
        figures += found
        measured |= details
    print_figures(figures, measured=measured, as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def measure_publish(folder: Path, *, rounds: int) -> tuple[list[Figure], dict[str, float]]:
    """To a store of ten branches of ten tasks, and to one lineage of a hundred, whose manifests
    are ten times as long."""
    figures: list[Figure] = []
    measured: dict[str, float] = {}
    for shape, tasks in (("ten branches", 10), ("one lineage", VERSIONS)):
        found = publish_beside_bare(folder / shape, tasks=tasks, rounds=rounds)
        name = f"publish of a 4 MiB delta to {VERSIONS} versions in {shape}, in bare loops"
        figures.append(at_most(name, found["publish ms"] / found["bare loop ms"], 1.5))
        measured |= {f"{what}, {shape}": value for what, value in found.items()}
    return figures, measured


def publish_beside_bare(folder: Path, *, tasks: int, rounds: int) -> dict[str, float]:
    memory = MemoryObjects()
    empty = Store.create("models", objects=memory)
    for _ in range(VERSIONS // tasks):
        parent = drafts.publish_lineage(empty, tasks)[-1]
    store, bare = folder / "models", folder / "bare"
    for location in (store, bare):
        lay_out(memory, location)
    heads = heads_for(parent, DELTA_BYTES)
    timed: dict[str, list[float]] = {"publish ms": [], "bare loop ms": []}
    calls: dict[str, Counter[str]] = {}
    written: list[Write] = []
    for number in range(rounds + 1):
        delta = drafts.prepare(
            parent=parent, task="next", heads=heads, images=0, seed=1000 + number
        )
        recorder = Recorder(LocalDirectory(store))
        opened = Store.open(str(store), objects=recorder)
        # Each in its turn goes first: whoever does pays for memory and for a disk at rest.
        works: list[tuple[str, Callable[[], object]]] = [
            ("publish ms", partial(delta.publish, opened)),
            ("bare loop ms", partial(bare_loop, bare, written)),
        ]
        for name, work in works if number % 2 else reversed(works):
            with counted_calls() as calls[name]:
                timed[name].append(1000 * timed_s(work))
        written = recorder.written
        if number and calls["publish ms"] != calls["bare loop ms"]:
            sys.exit(f"the bare loop does not do the same: {calls}")
    medians = {name: statistics.median(times[1:]) for name, times in timed.items()}
    return {
        **medians,  # the first round had nothing to repeat yet
        "written MiB": sum(len(one.data or b"") for one in written) / (1 << 20),
        **{f"calls of {call} in a publish": n for call, n in calls["publish ms"].items()},
    }


@dataclass(frozen=True, slots=True)
class Write:
    """One object that was created, or deleted where there are no bytes."""

    name: str
    data: bytes | None


class Recorder(WatchedObjects):
    """Keeps what is written, so that it can be written again."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects)
        self.written: list[Write] = []

    def create(self, name: str, data: bytes) -> bool:
        self.written.append(Write(name, data))
        return super().create(name, data)

    def delete(self, name: str) -> None:
        self.written.append(Write(name, None))
        super().delete(name)


def bare_loop(root: Path, written: Sequence[Write]) -> None:
    """The least that makes the same objects durable: no hashing, no checking, no reading."""
    synced = {root}
    for one in written:
        path = root / one.name
        if one.data is None:
            os.unlink(path)
            sync_folder(path.parent)
            continue
        for folder in (root / "tmp", *reversed(path.relative_to(root).parents[:-1])):
            make_folder(root / folder, synced)
        temporary = root / "tmp" / uuid.uuid4().hex
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.write(file, one.data)
        os.fsync(file)
        os.close(file)
        os.link(temporary, path)
        os.unlink(temporary)
        sync_folder(path.parent)


def make_folder(folder: Path, synced: set[Path]) -> None:
    if folder not in synced:
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
        synced.add(folder)


def sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(opened)
    os.close(opened)


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """How often each of the calls that cost something is made inside."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(os, name) for name in COUNTED}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in COUNTED:
        setattr(os, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def heads_for(parent: Manifest, wanted_bytes: int) -> int:
    """Attention heads of an expert that, with its classifier, has about that many bytes."""
    for heads in itertools.count(1):
        task = TaskSpec(name="next", classes=("a", "b"), expert=ExpertSpec(heads=heads))
        spec = parent.spec.expand(task)
        tensors = (
            *spec.expert_tensors(len(parent.tasks)).values(),
            *spec.classifier_tensors().values(),
        )
        if 4 * sum(map(math.prod, tensors)) >= wanted_bytes:
            return heads
    raise AssertionError("numbers do not end")


def measure_open(folder: Path, *, rounds: int) -> tuple[list[Figure], dict[str, float]]:
    reads: dict[int, int] = {}
    times_ms: dict[int, float] = {}
    for versions in (10, 1000):
        memory = MemoryObjects()
        store = Store.create("models", objects=memory)
        (root,) = drafts.publish_lineage(store, 1)
        for number in range(2, versions + 1):
            drafts.prepare(parent=root, task="next", images=0, seed=number).publish(store)
            store.promote(number, channel="production", actor="a@b", reason="")
        location = folder / str(versions)
        lay_out(memory, location)
        watched = WatchedObjects(LocalDirectory(location))
        head = open_and_resolve(location, watched)
        if head.version != versions:
            sys.exit(f"the channel names version {head.version} instead of {versions}")
        reads[versions] = len(watched.names("read"))
        times_ms[versions] = 1000 * statistics.median(
            timed_s(partial(open_and_resolve, location, LocalDirectory(location)))
            for _ in range(rounds)
        )
    figure = Figure(
        "objects read to open a store of 1,000 versions and resolve a channel",
        reads[1000],
        f"as many as with 10 versions ({reads[10]})",
        reads[1000] == reads[10],
    )
    return [figure], {f"open and resolve ms, {n:,} versions": ms for n, ms in times_ms.items()}


def open_and_resolve(location: Path, objects: Objects) -> Manifest:
    store = Store.open(str(location), objects=objects)
    head = store.head("production")
    if head is None:
        sys.exit("the channel is empty")
    return store.resolve(head)


def measure_verify(folder: Path, *, rounds: int) -> tuple[list[Figure], dict[str, float]]:
    memory = MemoryObjects()
    store = Store.create("models", objects=memory)
    manifest: Manifest | None = None
    for task in range(4):
        manifest = drafts.prepare(parent=manifest, heads=512, images=0, seed=task).publish(store)
    if manifest is None:
        sys.exit("there is nothing to verify")
    lay_out(memory, folder / "models")
    memory.held.clear()
    files = [str(folder / "models" / shard_name(ref.sha256)) for ref in manifest.shards]
    mib = sum(ref.bytes for ref in manifest.shards) / (1 << 20)
    dne_store = str(Path(sys.executable).parent / "dne-store")
    verify = [dne_store, "verify", str(manifest.version), "--store", str(folder / "models")]
    local = Store.open(str(folder / "models"))
    works: dict[str, Callable[[], object]] = {
        "sha256sum": partial(run, ["sha256sum", *files]),
        "dne-store verify": partial(run, verify),
        "hashlib": partial(hash_all, files),
        "verify, in a process that runs already": partial(local.verify, manifest.version),
    }
    took: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(max(3, rounds // 2)):
        for name, work in works.items():
            took[name].append(timed_s(work))
    speeds = {name: mib / statistics.median(seconds) for name, seconds in took.items()}
    ratio = speeds["dne-store verify"] / speeds["sha256sum"]
    figure = at_least("speed of `dne-store verify N` in that of sha256sum", ratio, 0.7)
    return [figure], {f"MiB/s, {name}": speed for name, speed in speeds.items()}


def measure_borrowers(folder: Path, *, rounds: int) -> tuple[list[Figure], dict[str, float]]:
    """A backbone of the size of a ViT-Ti, and classifiers of ten classes without pictures: what is
    stored beyond it all is a copy, or overhead."""
    shared = Store.create(str(folder / "shared"))
    begun = drafts.prepare(
        geometry=VIT_TI, heads=3, classes=[f"class {n}" for n in range(10)], images=0
    )
    backbone = begun.publish(shared).experts[0]
    sizes = [(folder / "shared" / shard_name(backbone.sha256)).stat()]
    for number in range(BORROWERS):
        store = Store.create(str(folder / f"{number:04}"), alternates=[shared.location])
        manifest = with_classifier_of_its_own(begun, seed=number).publish(store)
        store.promote(1, channel="production", actor="a@b", reason="")
        names = (
            shard_name(manifest.classifier.sha256),
            version_name(1),
            record_name("production", 1),
        )
        sizes += [(Path(store.location) / name).stat() for name in names]
    needed = sum(size.st_size for size in sizes)
    blocks = sum(size.st_blocks for size in sizes)
    every = [path.stat() for path in folder.rglob("*")]
    stored = sum(size.st_size for size in every if stat.S_ISREG(size.st_mode))
    if Store.open(store.location).verify().problems:
        sys.exit("a borrower is damaged")
    figure = at_most(
        f"bytes of {BORROWERS:,} stores with an alternate, in those of one backbone, their "
        "classifiers and records",
        stored / needed,
        1.1,
    )
    return [figure], {
        f"MiB of {BORROWERS:,} stores with an alternate": stored / (1 << 20),
        f"MiB of {BORROWERS:,} stores of their own, with a backbone each": (
            needed + (BORROWERS - 1) * backbone.bytes
        )
        / (1 << 20),
        "blocks with folders, in those of the same files": sum(s.st_blocks for s in every) / blocks,
    }


def with_classifier_of_its_own(begun: drafts.Prepared, *, seed: int) -> drafts.Prepared:
    """The same version with other weights in its classifier."""
    draft, expert = begun.draft, begun.draft.experts[0].sha256
    data = drafts.weights(draft.spec.classifier_tensors(), seed=1 + seed)
    classifier = shard_ref("classifier", data)
    changed = draft.model_copy(update={"classifier": classifier, "transaction": uuid.uuid4().hex})
    shards = {expert: begun.shards[expert], classifier.sha256: data}
    return drafts.Prepared(changed, shards)


MEASURES = {
    "publish": measure_publish,
    "open": measure_open,
    "verify": measure_verify,
    "borrowers": measure_borrowers,
}


def hash_all(files: Sequence[str]) -> None:
    for file in files:
        hashlib.sha256(Path(file).read_bytes())


def run(command: Sequence[str]) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def lay_out(memory: MemoryObjects, location: Path) -> None:
    """The same store in a directory, without waiting for the disk a thousand times."""
    (location / "tmp").mkdir(parents=True)
    for name, data in memory.held.items():
        path = location / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    os.sync()


def timed_s(work: Callable[[], object]) -> float:
    os.sync()  # what others left to write is not to be waited for by whoever syncs first
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    sys.exit(main())
