"""Describe what the server has done, and hand each description to everyone who subscribed.

`Predictor` emits one `Answered` for each request, and one `Compared` where another version was
asked too. Metrics, statistics, counts of answers, the guard and traces read the same event.

Spans describe a request or a swap for traces, without OpenTelemetry. Times are nanoseconds of
`time.perf_counter_ns`, as the metrics have them; they become times of day when a trace is sent.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from model_store.records.channel import ChannelRecord

if TYPE_CHECKING:  # the command line reads this room before it imports torch
    from dne_serve.engines.base import Resident
    from dne_serve.engines.scored import Scored

By = Literal["served", "canary", "asked"]
"""The reason why a version answers: it is served, it is the canary, or the request names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Beginning and end of a piece of work, by `time.perf_counter_ns`."""

    began_ns: int
    ended_ns: int

    @property
    def ns(self) -> int:
        return self.ended_ns - self.began_ns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """One request that a version has answered, or failed to answer."""

    resident: Resident
    by: By
    images: int
    times: Times
    """From the choice of the version to the logits, or to the error."""
    decoding: Times | None = None
    """Decoding of all images; None if an image could not be decoded."""
    scored: tuple[Scored, ...] = ()
    """One for each image; empty after an error."""
    error: Exception | None = None
    is_traffic: bool = True
    """False for pictures that were chosen because they are doubtful."""

    @property
    def version(self) -> int:
        return self.resident.version

    @property
    def unknown(self) -> int:
        """Count the images that are like no class of the version."""
        return sum(image.is_unknown for image in self.scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The images of one request on which two versions gave the same label, or different ones."""

    by: By
    """The reason why the first of the two answered."""
    same: int
    other: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """The subscribers of one server. They are called on the event loop, so each must be quick."""

    on_answered: tuple[Callable[[Answered], None], ...] = ()
    on_compared: tuple[Callable[[Compared], None], ...] = ()

    def answered(self, event: Answered) -> None:
        for note in self.on_answered:
            note(event)

    def compared(self, event: Compared) -> None:
        for note in self.on_compared:
            note(event)


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
class RequestEnd:
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
    model: str | None = None
    """The name of the model that was asked, where there are many."""
    version: int | None = None
    images: int = 0
    decoding: Times | None = None
    outcome: RequestEnd | None = None
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

    def _server_span(self, outcome: RequestEnd) -> Span:
        attributes: dict[str, str | int] = {
            "http.request.method": outcome.method,
            "http.response.status_code": outcome.status,
            "dne.request_id": self.request_id,
        }
        if outcome.route is not None:
            attributes["http.route"] = outcome.route
        if self.model is not None:
            attributes["dne.model"] = self.model
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
            span_id=_new_span_id(),
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


def _new_span_id() -> bytes:
    return os.urandom(8)


_MOST_LOADED = 16
"""Versions whose load is remembered until they are served. At most eight wait at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SwapTrace:
    """One record of a channel on one server. All servers that follow the record share the trace:
    its id comes from the record."""

    record: ChannelRecord
    load: Times | None
    swap: Times | None
    error: str | None = None
    model: str | None = None

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
            span_id=_new_span_id(),
            parent_id=parent_id,
            name=name,
            times=times,
            attributes={
                "dne.version": record.target,
                "dne.channel": record.channel,
                "dne.record": record.number,
                **({} if self.model is None else {"dne.model": self.model}),
            },
            error=self.error,
        )


class SwapTraces:
    """Joins the load of a version with the swap that follows, which may come later and on another
    thread."""

    def __init__(self, send: Callable[[Trace], None], *, model: str | None = None) -> None:
        self._send = send
        self._model = model
        self._loads: dict[int, Times] = {}

    def loaded(self, record: ChannelRecord, times: Times) -> None:
        self._loads[record.number] = times
        while len(self._loads) > _MOST_LOADED:
            self._loads.pop(min(self._loads), None)

    def not_loaded(self, record: ChannelRecord, times: Times, error: str) -> None:
        self._send(_SwapTrace(record=record, load=times, swap=None, error=error, model=self._model))

    def swapped(self, record: ChannelRecord, times: Times) -> None:
        load = self._loads.pop(record.number, None)
        self._send(_SwapTrace(record=record, load=load, swap=times, model=self._model))
