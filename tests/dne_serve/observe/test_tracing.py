"""A server with a collector sends traces of what it does, and waits for no collector."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.exporter.otlp.common.http import _OTLPHTTPClient
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from dne_serve.log_lines import JsonLine
from dne_serve.observe import otlp
from dne_serve.observe.events import Span as MadeSpan
from dne_serve.observe.events import Times
from dne_serve.observe.otlp import OtlpSender
from dne_serve.observe.tracing import check_extra
from dne_serve.setting_values import parse_url
from dne_serve.settings import load_settings
from model_store.errors import WrongUsage
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.observe.collector import Collector, collecting, values
from tests.dne_serve.receiver import HANG
from tests.live_server import Live, live_server, png, wait_for
from tests.tiny_versions import flip_last_bit, promote, publish_tiny
from tests.trained_store import TrainedStore

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtlpSender.__init__, "__kwdefaults__", {"pause_s": 0.02})
    monkeypatch.setattr(_OTLPHTTPClient, "_compute_backoff", lambda client, retry: 0.02)


@pytest.fixture
def traced(store: Store, digits: Manifest) -> Iterator[tuple[Live, Collector]]:
    with (
        collecting() as collector,
        live_server(store.location, otlp_endpoint=collector.url) as live,
    ):
        live.wait_until_ready()
        yield live, collector


def ask(live: Live, traceparent: str | None = None, *, images: int = 1) -> httpx.Response:
    files = [("files", (f"{seed}.png", png(seed))) for seed in range(images)]
    headers = {} if traceparent is None else {"traceparent": traceparent}
    return live.http.post("/predict", files=files, headers=headers)


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in sorted(spans, key=lambda span: span.start_time_unix_nano)]


def test_a_request_to_a_trained_version_is_told_with_its_parts(trained_store: TrainedStore) -> None:
    image, before = trained_store.image("a"), time.time_ns()
    with collecting() as collector:
        with live_server(trained_store.location, otlp_endpoint=collector.url) as live:
            live.wait_until_ready()
            answer = live.predict(image, image)
        (server,) = collector.named("POST /predict")
    assert server.kind == Span.SPAN_KIND_SERVER
    assert values(server.attributes) == {
        "http.request.method": "POST",
        "http.route": "/predict",
        "http.response.status_code": 200,
        "dne.request_id": answer.headers["x-request-id"],
        "dne.version": trained_store.served,
        "dne.images": 2,
    }
    parts = collector.below(server)
    assert {part.trace_id for part in parts} == {server.trace_id}
    assert set(names(parts)) == {"decode", "wait", "compute"}
    ordered = sorted(parts, key=lambda part: part.start_time_unix_nano)
    assert ordered[0].name == "decode"
    assert sum(values(one.attributes)["dne.images"] for one in parts if one.name == "compute") == 2  # type: ignore[misc]
    for part in parts:
        assert before < server.start_time_unix_nano <= part.start_time_unix_nano
        assert part.start_time_unix_nano <= part.end_time_unix_nano <= server.end_time_unix_nano
    assert server.end_time_unix_nano < time.time_ns()
    assert collector.resource["service.name"] == "dne-serve"
    post = collector.receiver.posts[0]
    assert (post.method, post.path) == ("POST", "/v1/traces")
    assert post.headers["content-type"] == "application/x-protobuf"


def test_the_parts_are_those_that_prometheus_sees(traced: tuple[Live, Collector]) -> None:
    live, collector = traced
    ask(live)
    collector.find("POST /predict")
    for name in ("decode", "wait", "compute"):
        (span,) = collector.named(name)
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert live.metric(f"dne_{name}_seconds_sum") == pytest.approx(seconds, abs=1e-9)


def test_a_clients_trace_is_gone_on_with(traced: tuple[Live, Collector]) -> None:
    live, collector = traced
    ask(live, SAMPLED)
    span = collector.find("POST /predict")
    assert span.trace_id.hex() == TRACE
    assert span.parent_span_id.hex() == SPAN
    assert span.flags == 0x300  # the parent is of another process


def test_a_client_that_does_not_sample_is_not_traced(traced: tuple[Live, Collector]) -> None:
    live, collector = traced
    ask(live, UNSAMPLED)
    ask(live, images=2)
    assert values(collector.find("POST /predict").attributes)["dne.images"] == 2
    assert len(collector.named("POST /predict")) == 1


@pytest.mark.parametrize(
    "hostile", [f"00-{'0' * 32}-{SPAN}-01", "x" * 5000, "00-\xff\xfe", f"{SAMPLED}, {SAMPLED}"]
)
def test_a_hostile_traceparent_gets_an_answer_and_a_trace_of_its_own(
    hostile: str, traced: tuple[Live, Collector]
) -> None:
    live, collector = traced
    headers = {b"traceparent": hostile.encode("latin-1")}
    answer = live.http.post("/predict", files=[("files", png())], headers=headers)
    assert answer.status_code == 200
    span = collector.find("POST /predict")
    assert span.trace_id.hex() != TRACE
    assert any(span.trace_id)
    assert not span.parent_span_id


@pytest.mark.long
def test_a_refusal_is_no_error_of_the_server_and_an_overload_is(
    store: Store, digits: Manifest
) -> None:
    with (
        collecting() as collector,
        live_server(
            store.location, otlp_endpoint=collector.url, max_wait_seconds=2, max_images=1
        ) as live,
    ):
        live.wait_until_ready()
        assert live.predict(b"no image").status_code == 422
        refused = collector.find("POST /predict")
        assert refused.status.code == Status.STATUS_CODE_UNSET
        with live.engine_held():
            assert ask(live).status_code == 503
        wait_for(lambda: len(collector.named("POST /predict")) == 2)
    late = collector.named("POST /predict")[1]
    assert late.status.code == Status.STATUS_CODE_ERROR
    assert values(late.attributes)["error.type"] == "503"
    assert names(collector.below(late)) == ["decode"]


def test_probes_are_not_traced_and_a_made_up_path_makes_up_no_name(
    traced: tuple[Live, Collector],
) -> None:
    live, collector = traced
    live.http.get("/healthz")
    live.http.get("/metrics")
    live.http.get("/made-up")
    span = collector.find("GET")
    assert "http.route" not in values(span.attributes)
    assert {one.name for one in collector.spans} <= {"GET", "follow", "load", "swap"}


def test_a_swap_is_a_trace_that_all_servers_of_the_channel_share(
    store: Store, letters: Manifest
) -> None:
    with collecting() as one, collecting() as other:
        with (
            live_server(store.location, otlp_endpoint=one.url) as first,
            live_server(store.location, otlp_endpoint=f"{other.url}/v1/traces") as second,
        ):
            first.wait_until_ready()
            second.wait_until_ready()
            promote(store, publish_tiny(store, tasks=[("x", ["x"])], parent=letters, seed=1))
            first.wait_until_serving(2)
            second.wait_until_serving(2)
        for collector in (one, other):
            root = collector.named("follow")[1]
            assert values(root.attributes) == {
                "dne.version": 2,
                "dne.channel": "production",
                "dne.record": 2,
            }
            load, swap = sorted(collector.below(root), key=lambda span: span.name)
            assert (load.name, swap.name) == ("load", "swap")
            assert load.end_time_unix_nano <= swap.start_time_unix_nano
        assert one.named("follow")[1].trace_id == other.named("follow")[1].trace_id
        assert one.named("follow")[0].trace_id != one.named("follow")[1].trace_id


def test_a_load_that_fails_is_an_error_of_its_span(store: Store, letters: Manifest) -> None:
    with collecting() as collector:
        with live_server(store.location, otlp_endpoint=collector.url) as live:
            live.wait_until_ready()
            broken = publish_tiny(store, tasks=[("x", ["x"])], parent=letters, seed=1)
            flip_last_bit(store, broken.experts[-1])
            promote(store, broken)
            wait_for(lambda: live.metric("dne_failed_loads_total") > 0)
        failed = [one for one in collector.named("load") if one.status.code]
    assert values(failed[0].attributes)["dne.version"] == 2
    assert broken.experts[-1].sha256[:8] in failed[0].status.message


@pytest.mark.parametrize(("share", "traced_requests"), [(0.0, 0), (1.0, 3)])
def test_the_share_of_the_setting_is_traced(
    store: Store, digits: Manifest, share: float, traced_requests: int
) -> None:
    with collecting() as collector:
        url = collector.url
        with live_server(store.location, otlp_endpoint=f"{url},sample={share}") as live:
            live.wait_until_ready()
            for _ in range(3):
                ask(live)
            ask(live, SAMPLED)
    assert len(collector.named("POST /predict")) == traced_requests + 1


def test_a_json_log_names_the_trace_beside_the_request(
    traced: tuple[Live, Collector], caplog: pytest.LogCaptureFixture
) -> None:
    live, _ = traced
    with caplog.at_level(logging.DEBUG, logger="dne_serve.requests"):
        answer = ask(live, UNSAMPLED)
    lines = [json.loads(JsonLine().format(one)) for one in caplog.records]
    (line,) = [one for one in lines if one.get("route") == "/predict"]
    assert line["trace_id"] == TRACE
    assert line["request_id"] == answer.headers["x-request-id"]


def test_a_collector_that_is_away_costs_no_answer_and_is_told_once(
    store: Store, digits: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    with collecting() as gone:
        url = gone.url
    with live_server(store.location, otlp_endpoint=url) as live:
        live.wait_until_ready()
        for _ in range(5):
            assert ask(live).status_code == 200
        wait_for(lambda: live.metric('dne_traces_total{outcome="failed"}') >= 3)
        assert live.metric('dne_traces_total{outcome="sent"}') == 0
    told = [
        one for one in caplog.records if one.name.startswith(("dne_serve.tracing", "opentelemetry"))
    ]
    assert [one.levelname for one in told] == ["WARNING"]
    assert "Connection refused" in told[0].getMessage()
    lost = [live.serving.metrics.traces.labels(end)._value.get() for end in ("failed", "dropped")]
    assert sum(lost) >= 6


def test_traces_wait_for_a_collector_that_comes_back(store: Store, digits: Manifest) -> None:
    with (
        collecting(503, 429) as collector,
        live_server(store.location, otlp_endpoint=collector.url) as live,
    ):
        live.wait_until_ready()
        answer = ask(live)
        wait_for(lambda: live.metric('dne_traces_total{outcome="sent"}') >= 2)
    assert len(collector.receiver.posts) >= 3
    last = collector.named("POST /predict")[-1]
    assert values(last.attributes)["dne.request_id"] == answer.headers["x-request-id"]


def test_traces_that_a_collector_refuses_are_counted_and_not_sent_again(
    store: Store, digits: Manifest
) -> None:
    with collecting(400) as collector:
        with live_server(store.location, otlp_endpoint=collector.url) as live:
            live.wait_until_ready()
            wait_for(lambda: live.metric('dne_traces_total{outcome="failed"}') >= 1)
        refused = {span.span_id for span in collector.spans if span.name == "follow"}
    assert len(refused) == 1


@pytest.mark.long
def test_a_collector_that_never_answers_holds_up_neither_answers_nor_the_end(
    store: Store, digits: Manifest
) -> None:
    with collecting(HANG, HANG) as collector:
        with live_server(store.location, otlp_endpoint=collector.url, grace_seconds=1) as live:
            live.wait_until_ready()
            collector.receiver.wait_for(1)
            assert ask(live).status_code == 200
            began = time.monotonic()
        assert time.monotonic() - began < 5


class TwoSpans:
    """A trace that is always the same."""

    def spans(self) -> Iterator[MadeSpan]:
        for parent_id in (b"", b"s" * 8):
            times = Times(began_ns=0, ended_ns=1)
            yield MadeSpan(
                trace_id=b"t" * 16, span_id=b"s" * 8, parent_id=parent_id, name="x", times=times
            )


def test_the_queue_is_bounded_and_drops_whole_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MOST_WAITING", 7)
    monkeypatch.setattr(otlp, "BATCH", 7)
    told: list[tuple[str, int]] = []
    with collecting() as collector:
        sender = OtlpSender(
            parse_url(collector.url),
            channel="production",
            on_outcome=lambda outcome, traces: told.append((outcome, traces)),
            pause_s=100,
        )
        sender.start()
        for _ in range(5):
            sender.put(TwoSpans())
        assert told == [("dropped", 1)] * 2
        sender.stop(within_s=10)
        assert len(collector.spans) == 6
    assert told[-1] == ("sent", 3)


def test_secrets_of_the_endpoint_reach_the_collector_and_nobody_else(
    store: Store, digits: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    with collecting(302) as collector:
        url = collector.url.replace("http://", "http://name:secret@") + "/secret/v1/traces"
        with live_server(store.location, otlp_endpoint=url) as live:
            live.wait_until_ready()
            ask(live)
            wait_for(lambda: live.metric('dne_traces_total{outcome="failed"}') >= 1)
            ask(live)  # the first post may have carried all traces so far
            wait_for(lambda: live.metric('dne_traces_total{outcome="sent"}') >= 1)
    post = collector.receiver.posts[0]
    assert post.path == "/secret/v1/traces"
    assert post.headers["authorization"].startswith("Basic ")
    assert "the answer was 302" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.long
def test_without_an_endpoint_nothing_that_writes_traces_is_imported() -> None:
    program = (
        "import sys; from dne_serve.app import create_app; from dne_serve.settings import Settings;"
        "from dne_serve.engines.torch_engine import TorchEngine;"
        "app = create_app(Settings(), engine=TorchEngine(device='cpu', threads=1));"
        "assert app.state.models.shared.tracer is None;"
        "written_with = ('opentelemetry.proto', 'opentelemetry.sdk', 'dne_serve.observe.otlp');"
        "print([name for name in sys.modules if name.startswith(written_with)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(("opentelemetry.sdk", "dne_serve.observe.otlp")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    check_extra(load_settings())
    with pytest.raises(WrongUsage, match=r"pip install 'dne-serve\[otel\]'"):
        check_extra(load_settings(otlp_endpoint="http://127.0.0.1:4318"))


@pytest.mark.parametrize(
    "wrong",
    ["127.0.0.1:4318", "grpc://secret", "http://", "http://secret host", "http://x/#secret"],
)
def test_an_endpoint_that_cannot_be_is_refused_and_not_repeated(wrong: str) -> None:
    with pytest.raises(WrongUsage) as caught:
        load_settings(otlp_endpoint=wrong)
    assert "otlp_endpoint" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["-0.1", "1.1", "nan", "all"])
def test_a_share_is_between_nothing_and_all(wrong: str) -> None:
    with pytest.raises(WrongUsage, match="otlp_endpoint: after the URL stands sample="):
        load_settings(otlp_endpoint=f"http://127.0.0.1:4318,sample={wrong}")
