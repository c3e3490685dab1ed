"""Sum up what the server does now. Nothing here waits or reads the store."""

from __future__ import annotations

from typing import Literal

from dne_serve.live.schemas import ActivityAnswer, Beside, RecentClass, RecentClasses, Swap
from dne_serve.rollout.answer_counts import OTHER, Recently
from dne_serve.server import Serving

MOST_CLASSES = 8
LONGEST_NAME = 60
"""Characters of a class name: a name may have 200, and an event should stay small."""


def snapshot(serving: Serving) -> ActivityAnswer:
    metrics, served = serving.metrics, serving.residents.served
    recently = metrics.answers.look(served.version) if served else None
    pace = metrics.latencies.pace()
    return ActivityAnswer(
        version=served.version if served else None,
        channel=serving.settings.channel,
        requests_per_second=_rounded(pace.requests_per_second),
        p50_ms=None if pace.p50_ms is None else _rounded(pace.p50_ms),
        p99_ms=None if pace.p99_ms is None else _rounded(pace.p99_ms),
        failed=None if pace.failed is None else round(pace.failed, 4),
        queue=serving.batcher.depth,
        queue_limit=serving.settings.max_queue,
        answers=_classes(recently) if recently else None,
        swap=_swap(serving),
        canary=_beside(serving, "canary"),
        shadow=_beside(serving, "shadow"),
    )


def _rounded(value: float) -> float:
    """Keep three digits: more would only make events longer."""
    return float(f"{value:.3g}")


def _classes(recently: Recently) -> RecentClasses:
    named = [one for one in recently.classes if one[0] != OTHER][:MOST_CLASSES]
    drift = recently.drift
    return RecentClasses(
        images=recently.images,
        unknown=recently.unknown,
        classes=[RecentClass(label=_short(name), images=count) for name, count in named],
        others=recently.images - sum(count for _, count in named),
        drift_classes=None if drift.classes is None else round(drift.classes, 2),
        drift_scores=None if drift.scores is None else round(drift.scores, 2),
    )


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _swap(serving: Serving) -> Swap | None:
    last = serving.metrics.last_swap
    if last is None:
        return None
    return Swap(version=last.version, time=round(last.time, 1), count=last.count)


def _beside(serving: Serving, name: Literal["canary", "shadow"]) -> Beside | None:
    version = serving.companions.ready(name)
    if version is None:
        return None
    agreed = serving.metrics.canary if name == "canary" else serving.metrics.shadow
    return Beside(version=version, same=agreed.same, other=agreed.other, answered=agreed.answered)
