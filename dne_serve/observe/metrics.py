"""Define the metrics for Prometheus, and the statistics of the Open Inference Protocol.

Labels are few and fixed: clients cannot add series. The label `model` names the first MAX_MODELS
models that were asked, and the others together.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from dne_serve.engines.base import Query, Resident
from dne_serve.engines.batcher import Ticket
from dne_serve.observe.answer_counts import (
    KEPT,
    OTHER,
    AnswerCounts,
    AnswerFamilies,
    Latencies,
    Minutes,
)
from dne_serve.observe.events import Answered, Compared
from model_store import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class _LastSwap:
    """The last change of the served version."""

    version: int
    count: int
    """Changes since the server started."""
    time: float = field(default_factory=time.time)


@dataclass(slots=True, kw_only=True)
class Agreement:
    """Images on which a version beside the served one gives the same label as it, or another."""

    same: int = 0
    other: int = 0
    answered: int = 0
    """Images that the version answered."""


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_MODELS = 100
_KEPT_OF_MANY = 256
"""Requests of a model whose times are remembered, where there are many models."""


class ServerMetrics:
    """The metrics of one server, in a registry of its own: two servers in one process share no
    counts."""

    def __init__(self, *, by_model: bool = False) -> None:
        """With `by_model` there are series of each model too."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # `_created` doubles the series
        self.registry = new = CollectorRegistry()
        counter, gauge = partial(Counter, registry=new), partial(Gauge, registry=new)
        times = partial(Histogram, buckets=SECONDS, registry=new)
        ProcessCollector(registry=new)
        self.build = Info("dne_build", "The software, and what computes the network.", registry=new)
        self._named: dict[str, AnswerCounts] = {}
        self._by_model = by_model
        new.register(AnswerFamilies(lambda: list(self._named.items()), by_model=by_model))
        self.requests = counter("dne_requests", "Requests answered.", ("method", "route", "status"))
        self.under_way = gauge("dne_requests_under_way", "Requests that wait for their answer.")
        self.seconds = times("dne_request_seconds", "From request to answer.", ("route",))
        self.images = counter("dne_images", "Images run through the network.")
        self.batch_images = Histogram(
            "dne_batch_images", "Images in a batch.", buckets=_BATCHES, registry=new
        )
        self.decode_seconds = times("dne_decode_seconds", "Decoding of a request's images.")
        self.wait_seconds = times("dne_wait_seconds", "From decoded image to its batch.")
        self.compute_seconds = times("dne_compute_seconds", "Run of a batch.")
        self.answered_images = counter(
            "dne_answered_images",
            "Images answered, by the served version, the canary, or one that was asked for.",
            ("by",),
        )
        self.shadow_images = counter(
            "dne_shadow_images",
            "Images on which the shadow would have given the same label, or another.",
            ("label",),
        )
        self.canary_images = counter(
            "dne_canary_images",
            "Images of the canary on which the served version would have given the same label, or "
            "another.",
            ("label",),
        )
        self.queue_images = gauge("dne_queue_images", "Images that wait for the engine.")
        self.queue_limit = gauge(
            "dne_queue_limit_images", "Images that may wait; more are answered 503."
        )
        self.served_version = gauge("dne_served_version", "The version that is served; 0 for none.")
        self.residents = gauge("dne_resident_versions", "Versions in memory.")
        self.model_bytes = gauge(
            "dne_model_bytes",
            "Experts and classifiers in memory; what versions share counts once.",
        )
        self.following = gauge("dne_following", "1 while what the channel names is what is served.")
        self.fallback = gauge(
            "dne_fallback",
            "1 while an earlier version is served because the head could not be loaded.",
        )
        self.channel_version = gauge(
            "dne_channel_version",
            "The version that the channel named when it was read last; 0 for none.",
        )
        self.followed = gauge(
            "dne_followed_timestamp_seconds",
            "When the channel was read last and its version was the served one; 0 for never.",
        )
        self.swaps = counter("dne_swaps", "Changes of the served version.")
        self.swapped_at = gauge(
            "dne_swap_timestamp_seconds", "When the served version changed last; 0 for never."
        )
        self.failed_loads = counter("dne_failed_loads", "Versions that could not be loaded.")
        self.guard_returns = counter("dne_guard_returns", "Promotions that the guard took back.")
        self.webhook = counter(
            "dne_webhook",
            "Events for webhooks: delivered, retried (each try), failed (given up), or dropped.",
            ("outcome",),
        )
        self.traces = counter(
            "dne_traces",
            "Traces of requests and swaps: sent, failed (refused by the collector), or dropped "
            "(it was away for too long).",
            ("outcome",),
        )
        self.collected = counter(
            "dne_collected_images", "Pictures kept in the inbox by this server."
        )
        self.not_collected = counter(
            "dne_collect_dropped_images",
            "Pictures that a rule would keep and that were not kept: no room in the queue, the cap "
            "of the hour or of all, a near-duplicate, a bad image, the store.",
            ("reason",),
        )

        if by_model:
            self.models_loaded = gauge("dne_models_loaded", "Models in memory.")
            self.model_requests = counter(
                "dne_model_requests", "Requests of a model answered.", ("model", "status")
            )
            self.model_seconds = times(
                "dne_model_request_seconds", "From a model's request to its answer.", ("model",)
            )
            self.model_images = counter(
                "dne_model_images", "Images that a model has answered.", ("model",)
            )

    def counts_of(self, model: str) -> ModelCounts:
        """Make the counts of a model, when it is loaded."""
        return ModelCounts(self, model, kept=_KEPT_OF_MANY if self._by_model else KEPT)

    def name_of(self, model: str, answers: AnswerCounts) -> str:
        """Return the value of the label `model`."""
        if model in self._named or len(self._named) < MAX_MODELS:
            self._named[model] = answers
            return model
        return OTHER

    def settled(self, outcome: str) -> None:
        """Count a picture that was offered to the inbox."""
        if outcome == "kept":
            self.collected.inc()
        elif outcome != "known":
            self.not_collected.labels(outcome).inc()

    def watch(self, **values: Callable[[], float]) -> None:
        """Set the gauges, by their attributes, that are read when Prometheus asks."""
        for name, value in values.items():
            gauge: Gauge = getattr(self, name)
            gauge.set_function(value)

    def built(self, *, backend: str, device: str, engine: str) -> None:
        """Name the software and what computes the network."""
        python = platform.python_version()
        self.build.info(
            {
                "version": __version__,
                "python": python,
                "backend": backend,
                "device": device,
                "engine": engine,
            }
        )

    def ran(self, images: int) -> None:
        self.batch_images.observe(images)
        self.images.inc(images)

    def computed(self, *, waits_ns: Iterable[int], run_ns: int) -> None:
        """Time a batch, and how long each of its images has waited."""
        self.compute_seconds.observe(run_ns / 1e9)
        for wait_ns in waits_ns:
            self.wait_seconds.observe(wait_ns / 1e9)

    def requested(self, method: str, route: str, *, status: int, seconds: float) -> None:
        """Count a request. `route` is the template of its path."""
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def answered(self, event: Answered) -> None:
        """Time the decoding of a request, and count its images by the version that answered."""
        if event.decoding is not None:
            self.decode_seconds.observe(event.decoding.ns / 1e9)
        if event.error is None and event.is_traffic:
            self.answered_images.labels(event.by).inc(event.images)

    def compared(self, event: Compared) -> None:
        """Count the images that two versions were asked for."""
        counter = self.canary_images if event.by == "canary" else self.shadow_images
        counter.labels("same").inc(event.same)
        counter.labels("other").inc(event.other)

    def posted(self, outcome: str) -> None:
        self.webhook.labels(outcome).inc()

    def traced(self, outcome: str, traces: int) -> None:
        self.traces.labels(outcome).inc(traces)

    def swapped(self, version: int) -> None:
        self.swaps.inc()
        self.swapped_at.set_to_current_time()
        if not self._by_model:
            self.served_version.set(version)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class ModelCounts:
    """The counts of one model: its answers, its latencies, its canary and its last swap."""

    def __init__(self, metrics: ServerMetrics, model: str, *, kept: int = KEPT) -> None:
        self._metrics = metrics
        self.answers = AnswerCounts()
        self.latencies = Latencies(kept)
        self.minutes = Minutes()
        self.canary, self.shadow = Agreement(), Agreement()
        self.last_swap: _LastSwap | None = None
        self._name = metrics.name_of(model, self.answers)

    def requested(self, route: str, *, status: int, seconds: float) -> None:
        self.minutes.add()
        if route == "/predict" or route.endswith("/infer"):
            self.latencies.add(seconds, failed=status >= 500)
        if self._metrics._by_model:
            self._metrics.model_requests.labels(self._name, str(status)).inc()
            self._metrics.model_seconds.labels(self._name).observe(seconds)

    def answered(self, event: Answered) -> None:
        """Count the images of a request, unless it failed or was not ordinary traffic."""
        self._metrics.answered(event)
        self.answers.answered(event)
        if event.error is not None or not event.is_traffic:
            return
        if event.by == "canary":
            self.canary.answered += event.images
        if self._metrics._by_model:
            self._metrics.model_images.labels(self._name).inc(event.images)

    def compared(self, event: Compared) -> None:
        """Count the images that two versions were asked for."""
        self._metrics.compared(event)
        agreement = self.canary if event.by == "canary" else self.shadow
        agreement.same += event.same
        agreement.other += event.other

    def swapped(self, version: int) -> None:
        self._metrics.swapped(version)
        count = self.last_swap.count if self.last_swap else 0
        self.last_swap = _LastSwap(version=version, count=count + 1)


@dataclass(slots=True, kw_only=True)
class Duration:
    """A number of events, and the time of all of them together."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns


@dataclass(slots=True, kw_only=True)
class VersionStatistics:
    """Counts and times of one version."""

    last_answer_ms: int = 0
    """Milliseconds since the epoch; 0 before the first answer."""
    images: int = 0
    """Images answered."""
    success: Duration = field(default_factory=Duration)
    """Requests answered, timed from the choice of the version to the logits."""
    fail: Duration = field(default_factory=Duration)
    """Requests that failed after the choice of the version."""
    decode: Duration = field(default_factory=Duration)
    """Decoding of all images, by request."""
    queue: Duration = field(default_factory=Duration)
    """Waiting for the engine, by image."""
    run: Duration = field(default_factory=Duration)
    """Run of the batch, by image."""
    batches: dict[int, Duration] = field(default_factory=dict)
    """Batches run, by the number of this version's images in them."""


class Statistics:
    """Statistics of all versions, safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_version: dict[int, VersionStatistics] = {}

    @property
    def versions(self) -> list[int]:
        """List the versions that had a request."""
        with self._lock:
            return sorted(self._by_version)

    def of(self, version: int) -> VersionStatistics:
        """Copy the statistics of a version; all zero for one without requests."""
        with self._lock:
            return deepcopy(self._by_version.get(version, VersionStatistics()))

    def answered(self, event: Answered) -> None:
        """Count a request, which may have failed."""
        with self._lock:
            row = self._row(event.version)
            if event.decoding is not None:
                row.decode.add(event.decoding.ns)
            if event.error is not None:
                row.fail.add(event.times.ns)
                return
            row.success.add(event.times.ns)
            row.images += event.images
            row.last_answer_ms = time.time_ns() // 1_000_000

    def ran(
        self, tickets: Sequence[Ticket[Resident, Query, Any]], began_ns: int, ended_ns: int
    ) -> None:
        """Count a batch. Its tickets need not be of one version."""
        sizes: dict[int, int] = {}
        with self._lock:
            for ticket in tickets:
                version = ticket.item.residents[0].version
                sizes[version] = sizes.get(version, 0) + 1
                row = self._row(version)
                row.queue.add(began_ns - ticket.arrived_ns)
                row.run.add(ended_ns - began_ns)
            for version, size in sizes.items():
                self._row(version).batches.setdefault(size, Duration()).add(ended_ns - began_ns)

    def _row(self, version: int) -> VersionStatistics:
        return self._by_version.setdefault(version, VersionStatistics())
