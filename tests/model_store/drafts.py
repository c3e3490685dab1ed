"""Small, valid versions without torch: real safetensors shards with made-up weights."""

from __future__ import annotations

import json
import math
import random
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from model_store.records.channel import ChannelRecord
from model_store.records.manifest import (
    Accuracy,
    ClassImages,
    ClassTokens,
    Draft,
    Manifest,
    Metrics,
    Preprocessing,
    Scalar,
    ShardRef,
    TaskRecord,
    geometry_of,
)
from model_store.spec import ExpertSpec, NetworkSpec, Shape, TaskSpec, statistics_tensors
from model_store.store.shard import shard_ref
from model_store.store.store import Store

GEOMETRY = NetworkSpec(image_size=8, patch_size=4, depth=1, head_width=2, mlp_ratio=2)
CREATED = "2024-05-06T07:08:09.000001Z"
DIGEST = "d" * 64


@dataclass(frozen=True, slots=True)
class Prepared:
    """A draft and the bytes of the shards that its parent does not have."""

    draft: Draft
    shards: dict[str, bytes]

    def publish(self, store: Store) -> Manifest:
        return store.publish(self.draft, shards=self.shards)


def prepare(
    *,
    parent: Manifest | None = None,
    task: str | None = None,
    classes: Sequence[str] | None = None,
    images: int = 2,
    seed: int = 0,
    accuracy: float | None = 0.5,
    heads: int = 2,
    geometry: NetworkSpec = GEOMETRY,
    training: Mapping[str, Scalar] | None = None,
) -> Prepared:
    """The next version after `parent`: one task more. `images` a class go into the memory.
    `geometry` of a version without a parent; `training`: figures of the newest task."""
    index = len(parent.tasks) if parent else 0
    task = task or f"task-{index}"
    classes = tuple(classes or (f"class-{index}a", f"class-{index}b"))
    before = parent.spec if parent else geometry
    spec = before.expand(TaskSpec(name=task, classes=classes, expert=ExpertSpec(heads=heads)))
    expert = weights(spec.expert_tensors(index), seed=seed)
    classifier = weights(spec.classifier_tensors(), seed=seed)
    made = {
        name: image_shard([f"{name} {seed} {i}".encode() for i in range(images)])
        for name in (classes if images else ())
    }
    shards = {
        shard_ref("expert", data).sha256: data for data in (expert, classifier, *made.values())
    }
    draft = Draft(
        parent=parent.version if parent else None,
        parent_digest=parent.digest if parent else None,
        transaction=uuid.uuid4().hex,
        network=geometry_of(spec),
        preprocessing=Preprocessing(image_size=spec.image_size),
        tasks=(
            *(parent.tasks if parent else ()),
            TaskRecord(
                name=task,
                classes=classes,
                heads=heads,
                attention_heads=heads,
                expert=shard_ref("expert", expert),
                training=dict(training or {}),
            ),
        ),
        classifier=shard_ref("classifier", classifier),
        memory=(
            *(parent.memory if parent else ()),
            *(
                ClassImages(class_name=name, shard=shard_ref("memory", data), count=images)
                for name, data in made.items()
            ),
        ),
        statistics=parent.statistics if parent else (),
        metrics=Metrics(
            accuracy=Accuracy(all=accuracy),
            per_class=dict.fromkeys(classes, 0.25),
            images=4,
            source="held-out",
            confusion={name: {classes[0]: 1} for name in classes},
        ),
        created=CREATED,
        software="dne-serve 0",
    )
    return Prepared(draft, shards)


def with_statistics(prepared: Prepared, *, count: int = 3, seed: int = 0) -> Prepared:
    """The same draft, with statistics of its newest classes beside those of the parent's."""
    draft, shards, entries = prepared.draft, dict(prepared.shards), []
    tensors = statistics_tensors(images=count, width=draft.spec.width_of(0))
    for place, name in enumerate(draft.tasks[-1].classes):
        data = weights(tensors, seed=1000 * len(draft.tasks) + 10 * seed + place)
        ref = shard_ref("statistics", data)
        shards[ref.sha256] = data
        entries.append(ClassTokens(class_name=name, shard=ref, count=count))
    update = {"statistics": (*draft.statistics, *entries)}
    return Prepared(draft.model_copy(update=update), shards)


def publish_lineage(
    store: Store, count: int, *, channel: str | None = "production"
) -> list[Manifest]:
    """Versions 1 to `count`, each the child of the one before, promoted in that order."""
    manifests: list[Manifest] = []
    for seed in range(count):
        manifest = prepare(parent=manifests[-1] if manifests else None, seed=seed).publish(store)
        manifests.append(manifest)
        if channel:
            store.promote(manifest.version, channel=channel, actor="a@b", reason="")
    return manifests


def weights(tensors: Mapping[str, Shape], *, seed: int) -> bytes:
    """A safetensors file with these tensors, float32, filled with small random numbers."""
    numbers = random.Random(f"{seed} {sorted(tensors)}")
    parts = {name: _small_numbers(math.prod(shape), numbers) for name, shape in tensors.items()}
    return safetensors({name: ("F32", tensors[name], part) for name, part in parts.items()})


def _small_numbers(count: int, numbers: random.Random) -> bytes:
    """Float32 between 2⁻⁷ and 2⁻⁵: sign and upper exponent are fixed, the rest is random."""
    drawn = bytearray(numbers.randbytes(4 * count))
    drawn[3::4] = b"\x3c" * count
    return bytes(drawn)


def image_shard(images: Sequence[bytes]) -> bytes:
    offsets = [sum(map(len, images[:index])) for index in range(len(images) + 1)]
    return safetensors(
        {
            "bytes": ("U8", (offsets[-1],), b"".join(images)),
            "offsets": ("I64", (len(offsets),), struct.pack(f"<{len(offsets)}q", *offsets)),
        }
    )


def safetensors(tensors: Mapping[str, tuple[str, Shape, bytes]]) -> bytes:
    header: dict[str, object] = {}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        end = position + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in tensors.values())


def record(number: int, target: int, mode: str = "follow", *, channel: str = "c") -> ChannelRecord:
    return ChannelRecord.model_validate(
        {
            "channel": channel,
            "number": number,
            "target": target,
            "target_digest": DIGEST,
            "mode": mode,
            "actor": "a@b",
            "reason": "",
            "time": CREATED,
            "transaction": "e" * 32,
        }
    )


def expert_refs(manifest: Draft) -> list[ShardRef]:
    return list(manifest.experts)
