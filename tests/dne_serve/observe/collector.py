"""A collector of traces on this machine, which reads OTLP with OpenTelemetry's own messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.dne_serve.receiver import Receiver, receiving
from tests.live_server import wait_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    receiver: Receiver

    @property
    def url(self) -> str:
        return self.receiver.url

    @property
    def spans(self) -> list[Span]:
        return [span for one in self._requests() for span in _spans(one)]

    @property
    def resource(self) -> dict[str, str | int]:
        """What the first message tells of its sender."""
        return values(self._requests()[0].resource_spans[0].resource.attributes)

    def find(self, name: str) -> Span:
        """Wait for a span of this name."""
        wait_for(lambda: any(span.name == name for span in self.spans))
        return next(span for span in self.spans if span.name == name)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def below(self, parent: Span) -> list[Span]:
        return [span for span in self.spans if span.parent_span_id == parent.span_id]

    def _requests(self) -> list[ExportTraceServiceRequest]:
        return [ExportTraceServiceRequest.FromString(post.body) for post in self.receiver.posts]


@contextmanager
def collecting(*answers: int) -> Iterator[Collector]:
    """`answers` are taken in turn; 200 once they are used up."""
    with receiving(*answers) as receiver:
        yield Collector(receiver=receiver)


def values(attributes: Iterable[KeyValue]) -> dict[str, str | int]:
    return {
        one.key: one.value.int_value if one.value.HasField("int_value") else one.value.string_value
        for one in attributes
    }


def _spans(request: ExportTraceServiceRequest) -> list[Span]:
    return [
        span
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
