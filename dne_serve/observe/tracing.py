"""Decide which requests are traced, and send their traces."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dne_serve.observe.events import (
    OTHER_METHOD,
    OnOutcome,
    RequestEnd,
    RequestTrace,
    SwapTraces,
    Times,
    Trace,
)
from dne_serve.setting_values import parse_endpoint
from dne_serve.settings import Settings
from model_store.errors import WrongUsage

HEADER = b"traceparent"
# A version above 00 may have more after the flags, and ff is not a version.
FORM = re.compile(
    rb"(?:00|(?!00|ff)[0-9a-f]{2}(?=.{53}(?:-|\Z)))-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})"
)
LONGEST = 256
SAMPLED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The span of a client that a request belongs to."""

    trace_id: bytes
    span_id: bytes
    is_sampled: bool


def parent_of(headers: Iterable[tuple[bytes, bytes]]) -> Parent | None:
    """Return the parent that the headers name. Ignore duplicate headers."""
    given = [value for name, value in headers if name == HEADER]
    return parse_traceparent(given[0]) if len(given) == 1 else None


def parse_traceparent(value: bytes) -> Parent | None:
    if len(value) > LONGEST:
        return None
    match = FORM.match(value)
    if match is None or (value.startswith(b"00") and match.end() != len(value)):
        return None
    trace_id, span_id = (bytes.fromhex(match[place].decode()) for place in (1, 2))
    if not any(trace_id) or not any(span_id):
        return None
    is_sampled = bool(int(match[3], 16) & SAMPLED)
    return Parent(trace_id=trace_id, span_id=span_id, is_sampled=is_sampled)


FLUSH_S = 2.0
"""Time to send the last traces when the server stops, or the grace time if this is shorter."""
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
"""Routes that machines call every few seconds. They are not traced."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
ALL = 1 << 64


class Sender(Protocol):
    """The part of the exporter that a tracer uses."""

    def put(self, trace: Trace) -> None:
        """Queue a trace. Return at once; any thread may call this."""

    def start(self) -> None: ...

    def stop(self, *, within_s: float) -> None: ...


class Tracer:
    """Traces of one server."""

    def __init__(self, sender: Sender, *, sample: float, flush_s: float) -> None:
        self._sender = sender
        self._below = round(sample * ALL)
        self._flush_s = flush_s

    def swaps(self, model: str | None) -> SwapTraces:
        """Make the traces of a model's swaps."""
        return SwapTraces(self._sender.put, model=model)

    def start(self) -> None:
        self._sender.start()

    def stop(self) -> None:
        self._sender.stop(within_s=self._flush_s)

    def begin(self, headers: Iterable[tuple[bytes, bytes]], *, request_id: str) -> RequestTrace:
        """Begin the trace of a request. The request is recorded if its `traceparent` says so.
        Without this header, the share of the setting decides by the trace's id."""
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
        trace.outcome = RequestEnd(
            method=method if method in METHODS else OTHER_METHOD,
            route=route,
            status=status,
            times=Times(began_ns=int(began_s * 1e9), ended_ns=int(ended_s * 1e9)),
        )
        self._sender.put(trace)


def check_extra(settings: Settings) -> None:
    """Raise WrongUsage if traces are asked for and OpenTelemetry is not installed."""
    if settings.otlp_endpoint is None:
        return
    try:
        import dne_serve.observe.otlp  # noqa: F401
    except ImportError as error:
        raise WrongUsage(
            "--otlp-endpoint needs the extra otel: pip install 'dne-serve[otel]'"
        ) from error


def make_tracer(settings: Settings, *, on_outcome: OnOutcome) -> Tracer | None:
    """Make the tracer that the settings ask for, or None. Without an endpoint, nothing of
    OpenTelemetry is imported."""
    check_extra(settings)
    if settings.otlp_endpoint is None:
        return None
    from dne_serve.observe.otlp import OtlpSender

    tracing = parse_endpoint(settings.otlp_endpoint)
    sender = OtlpSender(tracing.url, channel=settings.channel, on_outcome=on_outcome)
    flush_s = min(FLUSH_S, settings.grace_seconds)
    return Tracer(sender, sample=tracing.sample, flush_s=flush_s)
