"""Networks that have grown, with random weights, and stores that hold their versions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from model_store.codec import encode_classifier, encode_expert
from model_store.network.network import Network
from model_store.records.manifest import Draft, Manifest, Preprocessing, geometry_of, task_record
from model_store.spec import ExpertSpec, NetworkSpec, TaskSpec
from model_store.store.shard import shard_ref
from model_store.store.store import Store
from trainer.request import PRESETS

CLASSES_A_TASK = 10


def paper_spec(tasks: int, *, heads: int = 1) -> NetworkSpec:
    """The `paper` preset after this many tasks, with `heads` for each after the first."""
    return spec_of("paper", tasks, heads=heads)


def spec_of(name: str, tasks: int, *, heads: int = 1) -> NetworkSpec:
    """A preset after this many tasks, with `heads` for each after the first."""
    preset = PRESETS[name]
    return NetworkSpec(
        image_size=preset.image_size,
        patch_size=preset.patch_size,
        depth=preset.depth,
        tasks=tuple(
            TaskSpec(
                name=f"task {index}",
                classes=tuple(f"{index}-{number}" for number in range(CLASSES_A_TASK)),
                expert=ExpertSpec(heads=heads if index else preset.heads),
            )
            for index in range(tasks)
        ),
    )


def random_network(spec: NetworkSpec) -> Network:
    """As it starts, but for queries that are not zero, so that attention differs by image."""
    torch.manual_seed(0)
    network = Network(spec)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(".query"):
                torch.nn.init.xavier_uniform_(parameter)
    return network.requires_grad_(False).eval()


def publish_lineage(store: Store, network: Network, counts: Sequence[int]) -> list[Manifest]:
    """A version for each of these numbers of tasks, each on top of the one before."""
    made: list[Manifest] = []
    for count in counts:
        made.append(_publish(store, network, count, parent=made[-1] if made else None))
    return made


def _publish(store: Store, network: Network, count: int, *, parent: Manifest | None) -> Manifest:
    spec = network.spec.until(count)
    heads = [torch.nn.Linear(spec.token_width, len(task.classes)) for task in spec.tasks]
    version = Network.assemble(spec, list(network.experts)[:count], heads)  # type: ignore[arg-type]
    inherited = parent.tasks if parent else ()
    shards = {index: encode_expert(version, index) for index in range(len(inherited), count)}
    classifier = encode_classifier(version)
    records = tuple(
        task_record(spec.tasks[index], expert=shard_ref("expert", data))
        for index, data in shards.items()
    )
    draft = Draft(
        parent=parent.version if parent else None,
        parent_digest=parent.digest if parent else None,
        transaction=uuid.uuid4().hex,
        network=geometry_of(spec),
        preprocessing=Preprocessing(image_size=spec.image_size),
        tasks=(*inherited, *records),
        classifier=shard_ref("classifier", classifier),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        software="benchmarks",
    )
    new = {shard_ref("expert", data).sha256: data for data in shards.values()}
    return store.publish(draft, shards={**new, draft.classifier.sha256: classifier})
