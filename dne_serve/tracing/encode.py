"""Write traces as the OTLP message that collectors read. The only module that needs the extra
`otel`: it is imported when tracing is on."""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Iterable

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from dne_serve.tracing.spans import Attributes, Span, Trace
from model_store import __version__

KINDS = {"server": SpanMessage.SPAN_KIND_SERVER, "internal": SpanMessage.SPAN_KIND_INTERNAL}
SAMPLED, TELLS_REMOTE, IS_REMOTE = 0x1, 0x100, 0x200
"""Bits of a span's flags: it is sampled, the next bit counts, its parent is of another process."""


class Encoder:
    """Writes the traces of one server."""

    def __init__(self, *, channel: str) -> None:
        self._resource = Resource(
            attributes=_attributes(
                {
                    "service.name": "dne-serve",
                    "service.version": __version__,
                    "service.instance.id": str(uuid.uuid4()),
                    "host.name": platform.node(),
                    "process.pid": os.getpid(),
                    "dne.channel": channel,
                }
            )
        )

    def encode(self, traces: Iterable[Trace]) -> bytes:
        """Write one message with the spans of all traces."""
        # Anew for each message: the two clocks drift apart over weeks.
        epoch_ns = time.time_ns() - time.perf_counter_ns()
        spans = [_message(span, epoch_ns) for trace in traces for span in trace.spans()]
        scope = ScopeSpans(
            scope=InstrumentationScope(name="dne_serve", version=__version__), spans=spans
        )
        resource = ResourceSpans(resource=self._resource, scope_spans=[scope])
        written: bytes = ExportTraceServiceRequest(resource_spans=[resource]).SerializeToString()
        return written


def _message(span: Span, epoch_ns: int) -> SpanMessage:
    message = SpanMessage(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_id,
        name=span.name,
        kind=KINDS[span.kind],
        start_time_unix_nano=epoch_ns + span.began_ns,
        end_time_unix_nano=epoch_ns + span.ended_ns,
        attributes=_attributes(span.attributes),
        flags=SAMPLED | TELLS_REMOTE | (IS_REMOTE if span.parent_is_remote else 0),
    )
    if span.error is not None:
        message.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=span.error))
    return message


def _attributes(attributes: Attributes) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in attributes.items()]


def _value(value: str | int) -> AnyValue:
    return AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=value)
