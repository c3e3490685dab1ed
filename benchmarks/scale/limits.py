"""Measure a server with 1,000 tasks, with 100,000 classes and with many experts, and find limits.

The versions are made by hand with random weights: nobody learns 1,000 tasks for a benchmark. They
are published by the store's own code, and served by `dne-serve` in a process of its own.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import torch
from PIL import Image

from benchmarks.figures import Figure, at_least, at_most, print_figures
from model_store.codec import encode_classifier, encode_expert
from model_store.errors import SpecInvalid
from model_store.layout import version_name
from model_store.network.network import Network
from model_store.records.manifest import (
    ClassImages,
    Draft,
    Manifest,
    Preprocessing,
    ShardRef,
    encode,
    geometry_of,
    task_record,
)
from model_store.records.sealing import MAX_RECORD_BYTES
from model_store.spec import MAX_TASKS, ExpertSpec, NetworkSpec, TaskSpec
from model_store.store.shard import shard_ref
from model_store.store.store import Store
from tests.abuse.victim import Victim, serving
from trainer.request import PRESETS

ROUNDS = 20
PATHS = ("/classes", "/versions", "/versions/1")
WANTED_CLASSES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A network of the preset `small`. Tasks after the first have an expert of one head, or none
    and only a task head, as after `dne-train add-task --quick`."""

    tasks: int
    classes: int
    experts: bool = False

    def spec(self) -> NetworkSpec:
        preset = PRESETS["small"]
        younger = ExpertSpec(heads=1) if self.experts else None
        return NetworkSpec(
            image_size=preset.image_size,
            patch_size=preset.patch_size,
            depth=preset.depth,
            tasks=tuple(
                TaskSpec(
                    name=f"task {task}",
                    classes=tuple(f"class {task}-{number}" for number in range(self.classes)),
                    expert=younger if task else ExpertSpec(heads=preset.heads),
                )
                for task in range(self.tasks)
            ),
        )


SHAPES = {
    "1 task of 10 classes": Shape(tasks=1, classes=10),
    "1,000 tasks of 10 classes without experts": Shape(tasks=1000, classes=10),
    "100 tasks of 1,000 classes without experts": Shape(tasks=100, classes=1000),
    "10 tasks with experts": Shape(tasks=10, classes=10, experts=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    options = parser.parse_args()
    measured: dict[str, float] = {}
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder) / "models", shape)
        measured |= {f"{name}: {what}": value for what, value in found.items()}
        print(f"{name}: {found}", file=sys.stderr)
    limits = find_limits()
    print_figures(judge(measured, limits), measured=measured | limits, as_json=options.json)
    return 0


def measure(location: Path, shape: Shape) -> dict[str, float]:
    """Publish a version of that shape, serve it, and ask. Times are processor times."""
    began_s = time.process_time()
    manifest = publish(Store.create(str(location)), shape.spec())
    found = {
        "publish s": time.process_time() - began_s,
        "manifest kB": (location / version_name(1)).stat().st_size / 1e3,
        "MB of weights": sum(ref.bytes for ref in manifest.model_shards) / 1e6,
        "dne-store list s": listing_s(location),
    }
    with (
        serving("--store", str(location), "--poll-seconds", "60") as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        found["s until served"] = cpu_s(server.process.pid)
        for path in PATHS:
            asked = client.get(path, headers={"Accept-Encoding": "identity"}).raise_for_status()
            found[f"GET {path} kB"] = len(asked.content) / 1e3
            found[f"GET {path} ms"] = each_ms(server, partial(client.get, path))
        ask = partial(client.post, "/predict?top_k=5", content=picture())
        found["answer kB"] = len(ask().raise_for_status().content) / 1e3
        found["answer ms"] = each_ms(server, ask)
        found["memory of the server MB"] = server.resident_bytes() / 1e6
        found["… at most MB"] = server.peak_bytes() / 1e6
    return found


def listing_s(location: Path) -> float:
    command = [sys.executable, "-m", "model_store", "list", "--store", str(location)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit("dne-store list failed")
    return used.ru_utime + used.ru_stime


def each_ms(server: Victim, ask: Callable[[], httpx.Response]) -> float:
    """Return the processor time of the server for a request."""
    before_s = cpu_s(server.process.pid)
    for _ in range(ROUNDS):
        ask().raise_for_status()
    return 1000 * (cpu_s(server.process.pid) - before_s) / ROUNDS


def cpu_s(pid: int) -> float:
    """Read the user and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def publish(store: Store, spec: NetworkSpec) -> Manifest:
    torch.manual_seed(0)
    network = Network(spec).requires_grad_(False)
    experts = [encode_expert(network, index) for index in range(len(spec.experts))]
    classifier = encode_classifier(network)
    left = iter(shard_ref("expert", data) for data in experts)
    draft = draft_of(
        spec,
        experts=[next(left) if task.expert else None for task in spec.tasks],
        classifier=shard_ref("classifier", classifier),
    )
    shards = {shard_ref("expert", data).sha256: data for data in experts}
    manifest = store.publish(draft, shards={**shards, draft.classifier.sha256: classifier})
    store.promote(manifest.version, channel="production", actor="benchmarks", reason="")
    return manifest


def draft_of(
    spec: NetworkSpec,
    *,
    experts: Sequence[ShardRef | None],
    classifier: ShardRef,
    kept: Sequence[ClassImages] = (),
) -> Draft:
    return Draft(
        transaction=uuid.uuid4().hex,
        network=geometry_of(spec),
        preprocessing=Preprocessing(image_size=spec.image_size),
        tasks=tuple(
            task_record(task, expert=expert)
            for task, expert in zip(spec.tasks, experts, strict=True)
        ),
        classifier=classifier,
        memory=tuple(kept),
        created="2026-01-01T00:00:00.000000Z",
        software="benchmarks",
    )


def find_limits() -> dict[str, float]:
    """Find the numbers at which the code refuses to go on."""
    bare, kept = manifest_bytes(1000, keeps=False), manifest_bytes(1000, keeps=True)
    more = {keeps: manifest_bytes(11_000, keeps=keeps) for keeps in (False, True)}
    a_class = {False: (more[False] - bare) / 10_000, True: (more[True] - kept) / 10_000}
    a_class[True] = a_class[False] + 2 * (a_class[True] - a_class[False])  # memory and held-out
    most = most_experts()
    spec = Shape(tasks=most, classes=10, experts=True).spec()
    newest = sum(torch.Size(one).numel() for one in spec.expert_tensors(most - 1).values())
    return {
        "most tasks of a version": MAX_TASKS,
        "most experts of one head, preset small": most,
        "… GB of the network": 4 * spec.parameters / 1e9,
        "… MB of its newest expert": 4 * newest / 1e6,
        "bytes of a class in a manifest": a_class[False],
        "… with kept and held-out images": a_class[True],
        "most classes of a manifest": MAX_RECORD_BYTES // a_class[False],
        "… with kept and held-out images, most": MAX_RECORD_BYTES // a_class[True],
    }


def manifest_bytes(classes: int, *, keeps: bool) -> int:
    spec = Shape(tasks=1, classes=classes).spec()
    digest = "0" * 64
    kept = [
        ClassImages(
            class_name=name, shard=ShardRef(kind="memory", sha256=digest, bytes=20_000), count=20
        )
        for name in (spec.classes if keeps else ())
    ]
    expert = ShardRef(kind="expert", sha256="1" * 64, bytes=1)
    classifier = ShardRef(kind="classifier", sha256="2" * 64, bytes=1)
    draft = draft_of(spec, experts=[expert], classifier=classifier, kept=kept)
    return len(encode(draft, version=1))


def most_experts() -> int:
    """Search for the most experts that a spec allows."""
    fits, too_many = 1, MAX_TASKS + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        try:
            Shape(tasks=middle, classes=10, experts=True).spec()
        except SpecInvalid:
            too_many = middle
        else:
            fits = middle
    return fits


def judge(measured: dict[str, float], limits: dict[str, float]) -> list[Figure]:
    many = "100 tasks of 1,000 classes without experts"
    return [
        at_least("tasks without experts in a version", limits["most tasks of a version"], 1000),
        at_least(
            "tasks with experts of one head in a version",
            limits["most experts of one head, preset small"],
            1000,
        ),
        at_least("classes in a manifest", limits["most classes of a manifest"], WANTED_CLASSES),
        at_least(
            "classes in a manifest, with kept and held-out images",
            limits["… with kept and held-out images, most"],
            WANTED_CLASSES,
        ),
        at_most("answer over 100,000 classes, ms", measured[f"{many}: answer ms"], 100),
    ]


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 60)).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(main())
