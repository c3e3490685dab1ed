"""Send traces with the OpenTelemetry SDK and its OTLP exporter. The only module that needs the
extra `otel`: it is imported when tracing is on.

A collector that is away, slow or wrong costs traces, and never an answer.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from requests.adapters import BaseAdapter

from dne_serve.observe.events import OnOutcome, Span, Trace
from dne_serve.setting_values import WebhookUrl
from dne_serve.webhooks.outbox import NotPosted, Poster
from model_store import __version__

MOST_WAITING = 16_384
"""Spans that wait at most: about 4,000 traces of requests, and a few MB. A trace that finds no
place is dropped."""
BATCH = 2048
"""Spans in a post at most. As many wake the thread."""
PAUSE_S = 1.0
_TRY_S = 10.0
"""Time for a batch, with all tries. After it the batch is given up."""
_SDK_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
KINDS = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("dne_serve", __version__)

log = logging.getLogger("dne_serve.tracing")


class OtlpSender(SpanExporter):
    """The SDK's queue and exporter for the traces of one server. Counts the traces that are sent,
    and logs the first of several faults."""

    def __init__(
        self, url: WebhookUrl, *, channel: str, on_outcome: OnOutcome, pause_s: float = PAUSE_S
    ) -> None:
        self._url = url
        self._resource = _resource(channel)
        self._on_outcome = on_outcome
        self._pause_s = pause_s
        self._adapter = _WebhookAdapter(Poster(url))
        self._exporter = _exporter(url, self._adapter)
        self._processor: BatchSpanProcessor | None = None
        self._is_failing = self._is_shut = False
        self._lock = threading.Lock()
        self._spans = 0
        """Spans that wait."""
        self._traces = 0
        """Traces that wait, counted by their first span."""

    def start(self) -> None:
        """Start the SDK's thread."""
        self._processor = BatchSpanProcessor(
            self,
            max_queue_size=MOST_WAITING,
            schedule_delay_millis=1000 * self._pause_s,
            max_export_batch_size=BATCH,
        )

    def put(self, trace: Trace) -> None:
        epoch_ns = time.time_ns() - time.perf_counter_ns()  # the two clocks drift apart over weeks
        spans = [_readable(span, epoch_ns, self._resource) for span in trace.spans()]
        with self._lock:
            fits = self._spans + len(spans) <= MOST_WAITING
            if fits:
                self._spans += len(spans)
                self._traces += 1
        if not fits or self._processor is None:
            self._on_outcome("dropped", 1)
            return
        for span in spans:
            self._processor.on_end(span)

    def stop(self, *, within_s: float) -> None:
        """Send the traces that wait, within this time. A post under way is left alone after it."""
        if self._processor is None:
            return
        closing = threading.Thread(target=self._processor.shutdown, name="traces-end", daemon=True)
        closing.start()
        closing.join(within_s)
        self.shutdown()
        with self._lock:
            lost, self._traces = self._traces, 0
        if lost:
            self._on_outcome("dropped", lost)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Post one batch, on the SDK's thread."""
        traces = sum(span.parent is None or span.parent.is_remote for span in spans)
        with self._lock:
            self._spans -= len(spans)
            self._traces = max(0, self._traces - traces)
        result = self._exporter.export(spans)
        is_sent = result is SpanExportResult.SUCCESS
        self._tell(is_failing=not is_sent)
        self._on_outcome("sent" if is_sent else "failed", traces)
        return result

    def shutdown(self) -> None:
        """Post nothing more. The SDK calls this too."""
        with self._lock:
            is_first, self._is_shut = not self._is_shut, True
        if is_first:
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _tell(self, *, is_failing: bool) -> None:
        """Log the first of several faults: the others would repeat it for hours."""
        if is_failing and not self._is_failing:
            reason = self._adapter.fault or "they could not be written"
            log.warning("traces do not reach %s: %s; later ones are tried too", self._url, reason)
        if self._is_failing and not is_failing:
            log.info("traces reach %s again", self._url)
        self._is_failing = is_failing


class _WebhookAdapter(BaseAdapter):
    """Sends the exporter's posts as webhooks are sent: with one deadline, without redirects and
    proxies, and with a limit on the answer. The exporter never sees secrets of the URL."""

    def __init__(self, poster: Poster) -> None:
        super().__init__()
        self._poster = poster
        self.fault: str | None = None
        """The reason why the last post failed."""

    def send(
        self, request: requests.PreparedRequest, *args: Any, timeout: Any = None, **options: Any
    ) -> requests.Response:
        body = request.body if isinstance(request.body, bytes) else b""
        try:
            status = self._poster.post(body, headers=_headers(request), within_s=timeout or _TRY_S)
        except NotPosted as error:
            self.fault = str(error)
            raise requests.exceptions.ConnectionError(self.fault) from error
        self.fault = None if 200 <= status < 300 else f"the answer was {status}"
        if 300 <= status < 400:
            raise requests.exceptions.InvalidSchema("redirects are not followed")
        response = requests.Response()
        response.status_code, response.request = status, request
        return response

    def close(self) -> None:
        """Do nothing: each post has a connection of its own."""


def _headers(request: requests.PreparedRequest) -> dict[str, str]:
    """Return the exporter's headers. `Poster` adds the others."""
    own = ("content-length", "connection")
    return {name: str(value) for name, value in request.headers.items() if name.lower() not in own}


def _exporter(url: WebhookUrl, adapter: BaseAdapter) -> OTLPSpanExporter:
    # It would log a line for each try, and several lines for each batch.
    logging.getLogger(_SDK_LOG).setLevel(logging.CRITICAL)
    session = requests.Session()
    session.trust_env = False
    session.mount(f"{url.scheme}://", adapter)
    return OTLPSpanExporter(
        endpoint=str(url),
        timeout=_TRY_S,
        compression=Compression.NoCompression,
        headers={"User-Agent": f"dne-serve/{__version__}"},
        session=session,
    )


def _resource(channel: str) -> Resource:
    return Resource(
        {
            "service.name": "dne-serve",
            "service.version": __version__,
            "service.instance.id": str(uuid.uuid4()),
            "host.name": platform.node(),
            "process.pid": os.getpid(),
            "dne.channel": channel,
        }
    )


def _readable(span: Span, epoch_ns: int, resource: Resource) -> ReadableSpan:
    """Make the SDK's form of a span. A tracer of the SDK would take four times as long."""
    error = Status(StatusCode.ERROR, span.error) if span.error is not None else Status()
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id),
        parent=_context(span.trace_id, span.parent_id, is_remote=span.parent_is_remote)
        if span.parent_id
        else None,
        resource=resource,
        attributes=span.attributes,
        kind=KINDS[span.kind],
        status=error,
        start_time=epoch_ns + span.times.began_ns,
        end_time=epoch_ns + span.times.ended_ns,
        instrumentation_scope=_SCOPE,
    )


def _context(trace_id: bytes, span_id: bytes, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(
        int.from_bytes(trace_id, "big"), int.from_bytes(span_id, "big"), is_remote, SAMPLED
    )
