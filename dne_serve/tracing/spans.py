"""Describe spans, and the traces of a request and of a swap. Knows nothing of the wire.

Times are nanoseconds of `time.perf_counter_ns`, as the metrics have them. They become times of day
when a trace is sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, Protocol

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
    began_ns: int
    ended_ns: int
    kind: Kind = "internal"
    attributes: Attributes = field(default_factory=dict)
    error: str | None = None
    """The reason why the work failed; empty if the reason is not told."""


class Trace(Protocol):
    """Work that is over, and can be told as spans."""

    def spans(self) -> Iterator[Span]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a request."""

    method: str
    route: str | None
    status: int
    began_ns: int
    ended_ns: int


@dataclass(slots=True, kw_only=True, eq=False)
class RequestTrace:
    """One request, as far as it has come. Event loop and engine threads add to it; the spans are
    made of it later, on the thread that sends them."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes = b""
    is_recorded: bool
    request_id: str = ""
    version: int | None = None
    images: int = 0
    outcome: Outcome | None = None
    _decoded: list[tuple[int, int]] = field(default_factory=list)
    _runs: list[tuple[int, int, int]] = field(default_factory=list)

    def answers(self, version: int, *, images: int) -> None:
        """Note the version that answers."""
        self.version, self.images = version, images

    def decoded(self, began_ns: int, ended_ns: int) -> None:
        self._decoded.append((began_ns, ended_ns))

    def ran(self, arrived_ns: int, began_ns: int, ended_ns: int) -> None:
        """Note the batch of one image. Appending to a list takes no lock."""
        self._runs.append((began_ns, ended_ns, arrived_ns))

    def spans(self) -> Iterator[Span]:
        """Make the server's span, and below it one for decoding, and two for each batch: waiting
        for it, and its run."""
        if self.outcome is None:
            return
        yield self._server_span(self.outcome)
        for began_ns, ended_ns in self._decoded:
            yield self._part("decode", began_ns, ended_ns, images=self.images)
        batches: dict[tuple[int, int], list[int]] = {}
        for began_ns, ended_ns, arrived_ns in tuple(self._runs):
            batches.setdefault((began_ns, ended_ns), []).append(arrived_ns)
        for (began_ns, ended_ns), arrived in sorted(batches.items()):
            yield self._part("wait", min(arrived), began_ns, images=len(arrived))
            yield self._part("compute", began_ns, ended_ns, images=len(arrived))

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
            began_ns=outcome.began_ns,
            ended_ns=outcome.ended_ns,
            attributes=attributes,
            error="" if is_fault else None,
        )

    def _part(self, name: str, began_ns: int, ended_ns: int, *, images: int) -> Span:
        return Span(
            trace_id=self.trace_id,
            span_id=new_span_id(),
            parent_id=self.span_id,
            name=name,
            began_ns=began_ns,
            ended_ns=ended_ns,
            attributes={"dne.images": images},
        )


CURRENT: ContextVar[RequestTrace | None] = ContextVar("dne_serve.trace", default=None)
"""The trace of the request under way; None where the request is not recorded."""


def new_span_id() -> bytes:
    return os.urandom(8)
