"""Versions small enough for tests: 8×8 images, one block, one head an expert."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from model_store.codec import encode_classifier, encode_expert, load_network
from model_store.network.network import Network
from model_store.records.hierarchy import Hierarchy
from model_store.records.manifest import (
    Accuracy,
    Calibration,
    Draft,
    Manifest,
    Metrics,
    Preprocessing,
    ShardRef,
    Signs,
    Unknown,
    geometry_of,
    task_record,
)
from model_store.records.quality import Gate, Reduced
from model_store.spec import ExpertSpec, NetworkSpec, TaskSpec
from model_store.store.shard import shard_ref
from model_store.store.store import Store

IMAGE_SIZE = 8
TINY = NetworkSpec(image_size=IMAGE_SIZE, patch_size=4, depth=1)
Tasks = Sequence[tuple[str, Sequence[str]]]


def publish_tiny(
    store: Store,
    *,
    tasks: Tasks = (("letters", ("a", "b")),),
    parent: Manifest | None = None,
    accuracy: float | None = None,
    seed: int = 0,
    signer: Signs | None = None,
    unknown: Unknown | None = None,
    hierarchy: Hierarchy | None = None,
    heads: int = 1,
    spread: float = 1.0,
    agreement: Mapping[Reduced, float] | None = None,
    gate: Gate | None = None,
    temperature: float = 1.0,
    spec: NetworkSpec = TINY,
) -> Manifest:
    """A version with random weights that knows the parent's tasks and `tasks`. Not promoted.
    `heads` of each new expert, 0 for tasks without one; `spread` of the classifier's weights;
    `agreement` of reduced precisions, as if it had been measured; `gate`, as if it had judged;
    `spec` of a version without a parent."""
    weights = _weights(store, tasks, parent, seed=seed, spec=spec, heads=heads, spread=spread)
    experts, classifier = weights.experts, weights.classifier
    old = len(parent.experts) if parent else 0
    left = iter(experts)
    records = tuple(
        task_record(task, expert=shard_ref("expert", next(left)) if task.expert else None)
        for task in weights.spec.tasks
    )
    draft = Draft(
        parent=parent.version if parent else None,
        parent_digest=parent.digest if parent else None,
        transaction=uuid.uuid4().hex,
        network=geometry_of(weights.spec),
        preprocessing=Preprocessing(image_size=weights.spec.image_size),
        tasks=records,
        classifier=shard_ref("classifier", classifier),
        unknown=unknown,
        hierarchy=hierarchy,
        calibration=Calibration(temperature=temperature),
        metrics=Metrics(
            accuracy=Accuracy(all=accuracy, new=accuracy),
            agreement=dict(agreement or {}),
            gate=gate,
        ),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        software="tests",
    )
    shards = {shard_ref("expert", data).sha256: data for data in experts[old:]}
    made = {**shards, draft.classifier.sha256: classifier}
    return store.publish(draft, shards=made, signer=signer)


def promote(store: Store, manifest: Manifest, *, channel: str = "production") -> Manifest:
    store.promote(manifest.version, channel=channel, actor="tests", reason="")
    return manifest


def flip_last_bit(store: Store, ref: ShardRef) -> None:
    """Damages a shard in the store, as a failing disk would."""
    path = Path(store.location, "shards", ref.sha256[:2], f"{ref.sha256}.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """An encoded network."""

    spec: NetworkSpec
    experts: tuple[bytes, ...]
    classifier: bytes


_MADE: OrderedDict[Hashable, Weights] = OrderedDict()
"""Weights by all that they follow from: hundreds of tests begin with the same few versions."""
MOST_MADE = 8
"""Few enough that a test which looks for leaks finds none here: it makes more before it looks."""


def _weights(
    store: Store,
    tasks: Tasks,
    parent: Manifest | None,
    *,
    seed: int,
    spec: NetworkSpec,
    heads: int,
    spread: float,
) -> Weights:
    names = tuple((name, tuple(classes)) for name, classes in tasks)
    origin = (parent.spec, parent.model_shards) if parent else spec
    key = (names, origin, seed, heads, spread)
    if key in _MADE:
        _MADE.move_to_end(key)
        return _MADE[key]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _grown(store, tasks, parent, spec=spec, heads=heads, spread=spread)
    made = Weights(
        spec=network.spec,
        experts=tuple(encode_expert(network, index) for index in range(len(network.experts))),
        classifier=encode_classifier(network),
    )
    _MADE[key] = made
    if len(_MADE) > MOST_MADE:
        _MADE.popitem(last=False)
    return made


def _grown(
    store: Store,
    tasks: Tasks,
    parent: Manifest | None,
    *,
    spec: NetworkSpec,
    heads: int,
    spread: float,
) -> Network:
    network = Network(spec) if parent is None else load_network(store.read_shard, parent)
    expert = ExpertSpec(heads=heads) if heads else None
    for name, classes in tasks:
        network.expand(TaskSpec(name=name, classes=tuple(classes), expert=expert))
    # Heads start near zero, and then every answer looks the same: spread them out.
    for head in network.heads:
        torch.nn.init.normal_(head.get_parameter("weight"), std=spread)
    return network
