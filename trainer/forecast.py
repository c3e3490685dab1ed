"""What a version will cost, told before it is learnt: bytes, operations, time, and their growth.

Sizes and operations follow from the shapes, so they are exact; the time is measured on this
machine, with a network that has learnt nothing yet and takes as long as one that has.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from model_store.codec import encode_classifier, encode_expert
from model_store.network import FoldedNetwork, Network
from model_store.network.flops import folded_flops
from model_store.spec import ExpertSpec, NetworkSpec
from trainer.presets import heads_for

REPEATS = 5
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one version; operations and time are for one image alone."""

    bytes: int
    """Experts and classifier."""
    gflop: float
    """Multiplications and additions of matrix products, in 10^9."""
    latency_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    version: Cost
    delta_bytes: int
    parent: Cost | None
    following: Cost
    """After one more task like this one."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        new, later = self.version, self.following
        before = ""
        if self.parent is not None:
            old = self.parent
            before = (
                f" (now {old.bytes / MIB:.2f} MiB, {old.gflop:.3g} GFLOP, {old.latency_ms:.1f} ms)"
            )
        return (
            f"the version will have {new.bytes / MIB:.2f} MiB, {self.delta_bytes / MIB:.2f} of "
            f"them new, and take {new.gflop:.3g} GFLOP and about {new.latency_ms:.1f} ms an "
            f"image{before}; one more task like it would add "
            f"{(later.bytes - new.bytes) / MIB:.2f} MiB, {later.gflop - new.gflop:.3g} GFLOP "
            f"and {max(later.latency_ms - new.latency_ms, 0):.1f} ms"
        )


def forecast(
    network: Network, *, images: int, parent: NetworkSpec | None, parent_bytes: int
) -> Forecast:
    """Of the version that `network`, about to learn its newest task from `images`, will become."""
    classifier_bytes = len(encode_classifier(network))
    spec = network.spec
    if parent is not None and len(parent.tasks) == len(spec.tasks):
        expert_bytes = 0
    else:
        expert_bytes = len(encode_expert(network, len(spec.tasks) - 1))
    kept_bytes = parent_bytes if parent is not None else 0
    version = _cost(network, size=kept_bytes + expert_bytes + classifier_bytes)
    with torch.random.fork_rng(devices=[]):  # networks that are only weighed draw nothing
        before = None
        if parent is not None:
            before = _cost(_weighed(parent, network.device), size=kept_bytes + _heads_bytes(parent))
        later = _with_one_more(spec, images=images)
        grown = _weighed(later, network.device)
        more = 4 * (later.parameters - spec.parameters)
        following = _cost(grown, size=version.bytes + more)
    return Forecast(
        version=version,
        delta_bytes=expert_bytes + classifier_bytes,
        parent=before,
        following=following,
    )


def _weighed(spec: NetworkSpec, device: torch.device) -> Network:
    return Network(spec).to(device).requires_grad_(False).eval()


def _with_one_more(spec: NetworkSpec, *, images: int) -> NetworkSpec:
    newest = spec.tasks[-1]
    later = len(spec.tasks) > 1
    names = tuple(f"one more class {index}" for index in range(len(newest.classes)))
    # The first expert is the wide one: what follows it is narrow.
    expert = newest.expert if later else ExpertSpec(heads=heads_for(images))
    return spec.expand(replace(newest, name="one more task", classes=names, expert=expert))


def _heads_bytes(spec: NetworkSpec) -> int:
    return 4 * len(spec.classes) * (spec.token_width + 1)


def _cost(network: Network, *, size: int) -> Cost:
    return Cost(
        bytes=size,
        gflop=folded_flops(network.spec) / 1e9,
        # The least: what else the machine does is no cost of the version.
        latency_ms=min(latencies_ms(network, runs=REPEATS)),
    )


def latencies_ms(network: Network, *, runs: int) -> list[float]:
    """Of one image through the folded form on this machine, after a run that does not count."""
    folded, side = FoldedNetwork.of(network), network.spec.image_size
    image = torch.zeros(1, 3, side, side, device=network.device)
    times_ms = []
    with torch.inference_mode():
        for _ in range(1 + runs):
            started_s = time.perf_counter()
            folded(image).cpu()  # waits for a GPU to be done
            times_ms.append(1000 * (time.perf_counter() - started_s))
    return times_ms[1:]
