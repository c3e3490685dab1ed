"""Trace how a server follows a channel: loading a version, and swapping it in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dne_serve.tracing.spans import Span, Trace, new_span_id
from model_store.records.channel import ChannelRecord

MOST_LOADED = 16
"""Versions that are loaded and not served yet, of which more than eight never wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Beginning and end of a piece of work, by `time.perf_counter_ns`."""

    began_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTrace:
    """One record of a channel on one server. All servers that follow the record share the trace:
    its id comes from the record."""

    record: ChannelRecord
    load: Times | None
    swap: Times | None
    error: str | None = None

    def spans(self) -> Iterator[Span]:
        done = [one for one in (self.load, self.swap) if one is not None]
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
            began_ns=times.began_ns,
            ended_ns=times.ended_ns,
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
