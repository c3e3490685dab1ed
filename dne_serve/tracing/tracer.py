"""Decide which requests are traced, and send their traces."""

from __future__ import annotations

import os
from collections.abc import Iterable

from dne_serve.rules.webhooks import parse_endpoint
from dne_serve.settings import Settings
from dne_serve.tracing.outbox import OnOutcome, TraceOutbox
from dne_serve.tracing.spans import OTHER_METHOD, Outcome, RequestTrace
from dne_serve.tracing.swaps import SwapTraces
from dne_serve.tracing.traceparent import parent_of
from model_store.errors import WrongUsage

FLUSH_S = 2.0
"""Time that traces get at the end of the server, or the grace time if this is shorter."""
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
"""Routes that machines ask every few seconds. They are not traced."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
ALL = 1 << 64


class Tracer:
    """Traces of one server."""

    def __init__(self, outbox: TraceOutbox, *, sample: float, flush_s: float) -> None:
        self._outbox = outbox
        self._below = round(sample * ALL)
        self._flush_s = flush_s
        self.swaps = SwapTraces(outbox.put)

    def start(self) -> None:
        self._outbox.start()

    def stop(self) -> None:
        self._outbox.stop(within_s=self._flush_s)

    def begin(self, headers: Iterable[tuple[bytes, bytes]], *, request_id: str) -> RequestTrace:
        """Begin the trace of a request. A client that sends `traceparent` decides whether the
        request is recorded; else the share of the setting does, by the trace's id."""
        parent = parent_of(headers)
        made = os.urandom(24)
        if parent is not None:
            return RequestTrace(
                trace_id=parent.trace_id,
                span_id=made[16:],
                parent_id=parent.span_id,
                is_recorded=parent.is_sampled,
                request_id=request_id,
            )
        is_recorded = int.from_bytes(made[8:16], "big") < self._below
        return RequestTrace(
            trace_id=made[:16], span_id=made[16:], is_recorded=is_recorded, request_id=request_id
        )

    def end(
        self,
        trace: RequestTrace,
        *,
        method: str,
        route: str | None,
        status: int,
        began_s: float,
        ended_s: float,
    ) -> None:
        """Send the trace of a request that has its answer. Times are of `time.perf_counter`."""
        if not trace.is_recorded or route in QUIET:
            return
        trace.outcome = Outcome(
            method=method if method in METHODS else OTHER_METHOD,
            route=route,
            status=status,
            began_ns=int(began_s * 1e9),
            ended_ns=int(ended_s * 1e9),
        )
        self._outbox.put(trace)


def check_extra(settings: Settings) -> None:
    """Raise WrongUsage where traces are asked for, and what writes them is not installed."""
    if settings.otlp_endpoint is None:
        return
    try:
        import dne_serve.tracing.encode  # noqa: F401
    except ImportError as error:
        raise WrongUsage(
            "--otlp-endpoint needs the extra otel: pip install 'dne-serve[otel]'"
        ) from error


def make_tracer(settings: Settings, *, on_outcome: OnOutcome) -> Tracer | None:
    """Make the tracer that the settings ask for, or None. Without an endpoint nothing of
    OpenTelemetry is imported here."""
    check_extra(settings)
    if settings.otlp_endpoint is None:
        return None
    from dne_serve.tracing.encode import Encoder

    encoder = Encoder(channel=settings.channel)
    outbox = TraceOutbox(
        parse_endpoint(settings.otlp_endpoint), encode=encoder.encode, on_outcome=on_outcome
    )
    flush_s = min(FLUSH_S, settings.grace_seconds)
    return Tracer(outbox, sample=settings.otlp_sample, flush_s=flush_s)
