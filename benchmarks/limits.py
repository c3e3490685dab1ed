"""Measure a server with 1,000 tasks, with 100,000 classes and with many experts, and find limits.

The versions are made by hand with random weights: nobody learns 1,000 tasks for a benchmark. They
are published by the store's own code, and served by `dne-serve` in a process of its own.
"""

from __future__ import annotations

import argparse
import io
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from tests.abuse.victim import serving
from trainer.presets import PRESETS

ROUNDS = 5
WANTED_CLASSES = 100_000
WANTED_TASKS = 1000


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
    "25 experts": Shape(tasks=25, classes=10, experts=True),
    "50 experts": Shape(tasks=50, classes=10, experts=True),
    "100 experts": Shape(tasks=100, classes=10, experts=True),
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
    """Publish a version of that shape, serve it, and ask."""
    began_s = time.perf_counter()
    manifest = publish(Store.create(str(location)), shape.spec())
    found = {
        "publish s": time.perf_counter() - began_s,
        "manifest kB": (location / version_name(1)).stat().st_size / 1e3,
        "MB of weights": sum(ref.bytes for ref in manifest.model_shards) / 1e6,
    }
    listing = [sys.executable, "-m", "model_store", "list", "--store", str(location)]
    found["dne-store list s"] = seconds(lambda: subprocess.run(listing, check=True, capture_output=True))
    began_s = time.perf_counter()
    with serving("--store", str(location), "--poll-seconds", "1") as server:
        found["s until served"] = time.perf_counter() - began_s
        client = httpx.Client(base_url=server.url, timeout=120)
        for path in ("/classes", "/versions", "/versions/1", "/v2/models/production"):
            asked = client.get(path, headers={"Accept-Encoding": "identity"})
            found[f"GET {path} kB"] = len(asked.content) / 1e3 if asked.is_success else -1
            found[f"GET {path} ms"] = 1000 * seconds(lambda: client.get(path))
        image = picture()
        answer = client.post("/predict?top_k=5", content=image).raise_for_status()
        found["answer kB"] = len(answer.content) / 1e3
        found["answer ms"] = 1000 * seconds(lambda: client.post("/predict?top_k=5", content=image))
        found["memory of the server MB"] = server.resident_bytes() / 1e6
        found["… at most MB"] = server.peak_bytes() / 1e6
    return found


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
            "experts of one head in a version", limits["most experts of one head, preset small"], 1000
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


def seconds(work: object) -> float:
    """Time a call: the median of rounds."""
    took_s = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        work()
        took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s)


if __name__ == "__main__":
    sys.exit(main())
