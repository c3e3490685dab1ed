"""Trace requests and swaps. Imports nothing of OpenTelemetry before tracing is on.

Times are nanoseconds of `time.perf_counter_ns`, as the metrics have them. They become times of day
when a trace is sent.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dne_serve.observe.events import Answered, Times
from dne_serve.setting_values import parse_endpoint
from dne_serve.settings import Settings
from model_store.errors import WrongUsage
from model_store.records.channel import ChannelRecord

Kind = Literal["server", "internal"]
Attributes = Mapping[str, str | int]
OTHER_METHOD = "_OTHER"
"""The convention's word for a method that it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of work with a beginning and an end."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes = b""
    parent_is_remote: bool = False
    name: str
    times: Times
    kind: Kind = "internal"
    attributes: Attributes = field(default_factory=dict)
    error: str | None = None
    """The reason why the work failed; empty if the reason is unknown."""


class Trace(Protocol):
    """Finished work that consists of spans."""

    def spans(self) -> Iterator[Span]: ...


OnOutcome = Callable[[str, int], None]
"""Called with `sent`, `failed` or `dropped`, and with the number of traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a request."""

    method: str
    route: str | None
    status: int
    times: Times


@dataclass(slots=True, kw_only=True, eq=False)
class RequestTrace:
    """One request, as far as it has come. The event loop and engine threads add to it."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes = b""
    is_recorded: bool
    request_id: str = ""
    version: int | None = None
    images: int = 0
    decoding: Times | None = None
    outcome: Outcome | None = None
    _runs: list[tuple[int, int, int]] = field(default_factory=list)

    def ran(self, arrived_ns: int, began_ns: int, ended_ns: int) -> None:
        """Note the batch of one image. Appending to a list takes no lock."""
        self._runs.append((began_ns, ended_ns, arrived_ns))

    def spans(self) -> Iterator[Span]:
        """Make the server's span, and below it one for decoding, and two for each batch: waiting
        for it, and its run."""
        if self.outcome is None:
            return
        yield self._server_span(self.outcome)
        if self.decoding is not None:
            yield self._part("decode", self.decoding, images=self.images)
        batches: dict[tuple[int, int], list[int]] = {}
        for began_ns, ended_ns, arrived_ns in tuple(self._runs):
            batches.setdefault((began_ns, ended_ns), []).append(arrived_ns)
        for (began_ns, ended_ns), arrived in sorted(batches.items()):
            waiting = Times(began_ns=min(arrived), ended_ns=began_ns)
            yield self._part("wait", waiting, images=len(arrived))
            running = Times(began_ns=began_ns, ended_ns=ended_ns)
            yield self._part("compute", running, images=len(arrived))

    def _server_span(self, outcome: Outcome) -> Span:
        attributes: dict[str, str | int] = {
            "http.request.method": outcome.method,
            "http.response.status_code": outcome.status,
            "dne.request_id": self.request_id,
        }
        if outcome.route is not None:
            attributes["http.route"] = outcome.route
        if self.version is not None:
            attributes |= {"dne.version": self.version, "dne.images": self.images}
        is_fault = outcome.status >= 500
        if is_fault:
            attributes["error.type"] = str(outcome.status)
        method = "HTTP" if outcome.method == OTHER_METHOD else outcome.method
        return Span(
            trace_id=self.trace_id,
            span_id=self.span_id,
            parent_id=self.parent_id,
            parent_is_remote=bool(self.parent_id),
            name=f"{method} {outcome.route}" if outcome.route is not None else method,
            kind="server",
            times=outcome.times,
            attributes=attributes,
            error="" if is_fault else None,
        )

    def _part(self, name: str, times: Times, *, images: int) -> Span:
        return Span(
            trace_id=self.trace_id,
            span_id=new_span_id(),
            parent_id=self.span_id,
            name=name,
            times=times,
            attributes={"dne.images": images},
        )


CURRENT: ContextVar[RequestTrace | None] = ContextVar("dne_serve.trace", default=None)
"""The trace of the request under way; None where the request is not recorded."""


def note_answered(event: Answered) -> None:
    """Add the answer to the trace of the request under way."""
    trace = CURRENT.get()
    if trace is not None:  # without the event: its error would keep the images in memory
        trace.version, trace.images, trace.decoding = event.version, event.images, event.decoding


def new_span_id() -> bytes:
    return os.urandom(8)


MOST_LOADED = 16
"""Versions whose load is remembered until they are served. At most eight wait at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTrace:
    """One record of a channel on one server. All servers that follow the record share the trace:
    its id comes from the record."""

    record: ChannelRecord
    load: Times | None
    swap: Times | None
    error: str | None = None

    def spans(self) -> Iterator[Span]:
        done = [times for times in (self.load, self.swap) if times is not None]
        root = self._span("follow", Times(began_ns=done[0].began_ns, ended_ns=done[-1].ended_ns))
        yield root
        if self.load is not None:
            yield self._span("load", self.load, parent_id=root.span_id)
        if self.swap is not None:
            yield self._span("swap", self.swap, parent_id=root.span_id)

    def _span(self, name: str, times: Times, *, parent_id: bytes = b"") -> Span:
        record = self.record
        return Span(
            trace_id=hashlib.sha256(record.model_dump_json().encode()).digest()[:16],
            span_id=new_span_id(),
            parent_id=parent_id,
            name=name,
            times=times,
            attributes={
                "dne.version": record.target,
                "dne.channel": record.channel,
                "dne.record": record.number,
            },
            error=self.error,
        )


class SwapTraces:
    """Joins the load of a version with the swap that follows, which may come later and on another
    thread."""

    def __init__(self, send: Callable[[Trace], None]) -> None:
        self._send = send
        self._loads: dict[int, Times] = {}

    def loaded(self, record: ChannelRecord, times: Times) -> None:
        self._loads[record.number] = times
        while len(self._loads) > MOST_LOADED:
            self._loads.pop(min(self._loads), None)

    def not_loaded(self, record: ChannelRecord, times: Times, error: str) -> None:
        self._send(SwapTrace(record=record, load=times, swap=None, error=error))

    def swapped(self, record: ChannelRecord, times: Times) -> None:
        load = self._loads.pop(record.number, None)
        self._send(SwapTrace(record=record, load=load, swap=times))


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
        self.swaps = SwapTraces(sender.put)

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
        trace.outcome = Outcome(
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
