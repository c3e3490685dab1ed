"""Forecast the cost of a version before it is learnt: bytes, operations, time, and their growth.

Sizes and operations follow from the shapes, so they are exact. The time is measured on one core,
with the network before it learns: learning does not change the time. The difference of two such
times is less than their noise, so growth is told in operations, and a version that takes as many
as its parent is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from model_store.codec import encode_classifier, encode_doubt, encode_expert
from model_store.inference.forward import FoldedNetwork, Lineage
from model_store.network.flops import folded_flops
from model_store.network.network import Network
from model_store.spec import ExpertSpec, NetworkSpec
from model_store.tables import figure
from trainer.ranks.threads import one_thread
from trainer.request import heads_for

FEWEST_RUNS, MOST_RUNS = 3, 100
_ENOUGH_S = 0.4
"""Seconds of runs after which the least time hardly falls any more (ADR 34)."""
SAME = 1.005
"""The operations, in those of the parent, below which a version takes as many: a few more rows of
the classifier."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one version; operations and time are those of one image alone."""

    bytes: int
    """The size of experts and classifier."""
    gflop: float
    """Multiplications and additions of matrix products, in 10^9."""
    latency_ms: float | None = None
    """Time on one core, or on the GPU; None for versions that were not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    version: Cost
    delta_bytes: int
    parent: Cost | None
    following: Cost | None
    """The cost after one more task like this one; None where no task is added."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        new, later = self.version, self.following
        says = (
            f"the version will have {_mib(new.bytes)} MiB, {_mib(self.delta_bytes)} of them new, "
            f"and take {figure(new.gflop)} GFLOP an image{self._beside_parent()}"
        )
        if new.latency_ms is not None:
            says += f", here about {figure(new.latency_ms, digits=2)} ms of one core"
        if later is not None:
            says += (
                f"; one more task like it would add {_mib(later.bytes - new.bytes)} MiB and "
                f"{figure(later.gflop - new.gflop)} GFLOP"
            )
        return says

    def _beside_parent(self) -> str:
        old, new = self.parent, self.version
        if old is None:
            return ""
        if new.gflop < SAME * old.gflop:
            return f" as now ({_mib(old.bytes)} MiB)"
        times = figure(new.gflop / old.gflop, digits=2)
        return f", {times} times what it takes now ({_mib(old.bytes)} MiB)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """The sizes of the parent: a version keeps its experts, and has a classifier of its own."""

    spec: NetworkSpec
    expert_bytes: int
    classifier_bytes: int
    doubt_bytes: int = 0

    @property
    def cost(self) -> Cost:
        total = self.expert_bytes + self.classifier_bytes + self.doubt_bytes
        return Cost(bytes=total, gflop=_gflop(self.spec))


def forecast(
    network: Network,
    *,
    experts: Lineage,
    images: int,
    parent: Before | None,
    doubts: bool = False,
    replaces: bool = False,
) -> Forecast:
    """Forecast the version that `network` becomes by learning its newest task from `images`.

    `experts` are those of `network`, folded. `doubts`: tokens tell unknown images. `replaces`: its
    only expert takes the place of the parent's.
    """
    spec = network.spec
    older = len(parent.spec.experts) if parent and not replaces else 0
    newest = len(spec.experts) - 1
    expert_bytes = len(encode_expert(network, newest)) if newest >= older else 0
    adds_task = parent is None or len(spec.tasks) > len(parent.spec.tasks)
    delta_bytes = expert_bytes + len(encode_classifier(network))
    if doubts:
        empty = {name: np.zeros(shape, np.float32) for name, shape in spec.doubt_tensors().items()}
        delta_bytes += len(encode_doubt(empty))
    costs_more = parent is None or _gflop(spec) >= SAME * _gflop(parent.spec)  # worth measuring
    version = Cost(
        bytes=(parent.expert_bytes if parent and not replaces else 0) + delta_bytes,
        gflop=_gflop(spec),
        latency_ms=_least_ms(network, experts) if costs_more else None,
    )
    return Forecast(
        version=version,
        delta_bytes=delta_bytes,
        parent=parent.cost if parent else None,
        following=_following(version, spec, images=images) if adds_task else None,
    )


def _following(version: Cost, spec: NetworkSpec, *, images: int) -> Cost:
    newest = spec.tasks[-1]
    names = tuple(f"one more class {index}" for index in range(len(newest.classes)))
    # The first expert is wide, and all later ones are narrow.
    expert = newest.expert if len(spec.tasks) > 1 else ExpertSpec(heads=heads_for(images))
    later = spec.expand(replace(newest, name="one more task", classes=names, expert=expert))
    more_bytes = 4 * (later.parameters - spec.parameters)
    return Cost(bytes=version.bytes + more_bytes, gflop=_gflop(later))


def _gflop(spec: NetworkSpec) -> float:
    return folded_flops(spec) / 1e9


def _mib(count: int) -> str:
    return f"{count / MIB:.2f}"


def _least_ms(network: Network, experts: Lineage) -> float:
    """Time one image through the folded form: the least of many runs.

    Measure CPU time of one thread, so that other work on the machine counts little; on a GPU
    measure by the clock. Torch computes it, as it does while learning: `model_store.worth` tells
    the minutes of growing by this time.
    """
    run = _one_image(network, experts)
    clock = time.thread_time if network.device.type == "cpu" else time.perf_counter
    least_s, spent_s = float("inf"), 0.0
    with one_thread():
        run()
        for done in range(1, MOST_RUNS + 1):
            started_s = clock()
            run()
            took_s = clock() - started_s
            least_s, spent_s = min(least_s, took_s), spent_s + took_s
            if done >= FEWEST_RUNS and spent_s >= _ENOUGH_S:
                break
    return 1000 * least_s


def latencies_ms(network: Network, experts: Lineage, *, runs: int) -> list[float]:
    """Time one image through the folded form by the clock, after a run that does not count."""
    run, times_ms = _one_image(network, experts), []
    for _ in range(1 + runs):
        started_s = time.perf_counter()
        run()
        times_ms.append(1000 * (time.perf_counter() - started_s))
    return times_ms[1:]


def _one_image(network: Network, experts: Lineage) -> Callable[[], None]:
    folded = FoldedNetwork.classified(experts, network.state_dict())
    side = network.spec.image_size
    image = torch.zeros(1, 3, side, side, device=network.device)

    def run() -> None:
        with torch.inference_mode():
            folded(image).cpu()  # waits for a GPU to finish

    return run
