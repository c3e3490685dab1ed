from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model_store.backends.local import LocalDirectory
from model_store.layout import STORE, record_name, version_name, version_of
from model_store.maintenance.forget import delete_version
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.live_server import Live, assert_problem, live_server, png
from tests.many_versions import write_versions
from tests.tiny_versions import publish_tiny


def test_versions_lists_what_is_there_and_what_is_served(
    live: Live, store: Store, digits: Manifest
) -> None:
    publish_tiny(store, tasks=[("greek", ["alpha"])], parent=digits, seed=5)
    body = live.http.get("/versions").json()
    assert (body["served"], body["channel"], body["mode"]) == (2, "production", "follow")
    assert [one["version"] for one in body["versions"]] == [1, 2, 3]
    second = body["versions"][1]
    assert (second["parent"], second["tasks"], second["classes"]) == (1, 2, 5)
    assert second["new_classes"] == ["0", "1", "2"]
    assert second["accuracy"]["all"] == 0.9
    assert 0 < second["delta_bytes"] < second["total_bytes"]
    assert [(one["number"], one["target"]) for one in body["history"]] == [(1, 1), (2, 2)]


@pytest.fixture(scope="module")
def many_versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 300 versions that no test changes."""
    location = tmp_path_factory.mktemp("many") / "models"
    write_versions(location, count=300, tasks=2)
    return location


@pytest.fixture(scope="module")
def many(many_versions: Path) -> Iterator[Live]:
    with live_server(many_versions) as live:
        live.wait_until_ready()
        yield live


def _numbers(body: dict[str, Any]) -> list[int]:
    return [row["version"] for row in body["versions"]]


def test_versions_come_in_pages_that_name_the_next_one(many: Live) -> None:
    pages = [many.http.get("/versions").json()]
    while pages[-1]["next_before"] is not None:
        asked = {"before": pages[-1]["next_before"]}
        pages.append(many.http.get("/versions", params=asked).json())
    assert [len(page["versions"]) for page in pages] == [100, 100, 100]
    assert [page["total"] for page in pages] == [300] * 3
    assert [n for page in reversed(pages) for n in _numbers(page)] == list(range(1, 301))
    for page in pages:
        assert [one["number"] for one in page["history"]] == list(range(201, 301))


@pytest.mark.parametrize(
    ("query", "first", "last", "next_before"),
    [
        ("limit=3", 298, 300, 298),
        ("limit=1000", 1, 300, None),
        ("before=3", 1, 2, None),
        ("before=201&limit=1", 200, 200, 200),
        ("before=99999999&limit=1", 300, 300, 300),
    ],
)
def test_a_page_has_the_newest_below_a_number(
    many: Live, query: str, first: int, last: int, next_before: int | None
) -> None:
    body = many.http.get(f"/versions?{query}").json()
    assert (_numbers(body), body["next_before"]) == (list(range(first, last + 1)), next_before)
    assert body["served"] == 300


def test_a_page_before_the_first_version_is_empty(many: Live) -> None:
    body = many.http.get("/versions?before=1").json()
    assert (body["versions"], body["total"], body["next_before"]) == ([], 300, None)


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "before=0", "before=x", "limit=1e3"])
def test_a_page_that_makes_no_sense_is_refused(many: Live, query: str) -> None:
    assert_problem(many.http.get(f"/versions?{query}"), 400)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the objects that were read from any directory."""
    found: list[str] = []
    true_read = LocalDirectory.read

    def counted(self: LocalDirectory, name: str, *, max_bytes: int) -> bytes:
        found.append(name)
        return true_read(self, name, max_bytes=max_bytes)

    monkeypatch.setattr(LocalDirectory, "read", counted)
    return found


def test_a_page_reads_its_own_manifests_once_and_no_others(
    many_versions: Path, read: list[str]
) -> None:
    with live_server(many_versions, poll_seconds=60) as live:
        live.wait_until_ready()
        read.clear()
        first = live.http.get("/versions?before=51&limit=20").json()
        manifests = {version_name(number) for number in range(30, 51)}  # and the oldest's parent
        records = {record_name("production", number) for number in range(201, 301)}
        # The other server of these tests looks at its channel all the time.
        looks = {STORE, record_name("production", 300), record_name("production", 301)}
        assert set(read) - looks == (manifests | records) - looks
        read.clear()
        assert live.http.get("/versions?before=51&limit=20").json() == first
        assert set(read) <= looks


def test_one_version_is_shown_without_reading_the_others(many: Live, read: list[str]) -> None:
    for path in ("/versions/2", "/classes?version=2", "/v2/models/dne/versions/2"):
        assert many.http.get(path).status_code == 200
    found = {version_of(name) for name in read} - {None}
    assert found == {1, 2}, "the version and its parent"


def test_the_index_of_the_open_inference_protocol_reads_the_newest_alone(
    many: Live, read: list[str]
) -> None:
    rows = many.http.post("/v2/repository/index").json()
    assert [row["version"] for row in rows] == [str(number) for number in range(201, 301)]
    assert {version_of(name) for name in read} - {None} == set(range(201, 301))


def test_an_unreadable_record_does_not_hide_the_versions(live: Live, store: Store) -> None:
    Path(store.location, "channels/production/00000001.json").write_bytes(b"junk")
    body = live.http.get("/versions").json()
    assert _numbers(body) == [1, 2]
    assert [one["number"] for one in body["history"]] == [2]
    assert "channels/production/00000001.json" in body["problems"][0]


def test_a_row_follows_the_deletion_of_its_ancestor(live: Live, store: Store) -> None:
    before = live.http.get("/versions").json()["versions"][1]
    delete_version(store, 1, actor="tests", reason="")
    (after,) = live.http.get("/versions").json()["versions"]
    assert before["delta_bytes"] < after["delta_bytes"] == after["total_bytes"]


def test_an_unreadable_manifest_does_not_hide_the_others(live: Live, store: Store) -> None:
    publish_tiny(store, tasks=[("odd", ["x"])], seed=9)
    path = Path(store.location, "versions", "00000003.json")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b'"odd"', b'"ode"'))
    rows = live.http.get("/versions").json()["versions"]
    assert [one["version"] for one in rows] == [1, 2, 3]
    assert [bool(one["error"]) for one in rows] == [False, False, True]
    assert_problem(live.http.get("/versions/3"), 503)


def test_a_version_shows_what_it_is_made_of(live: Live, digits: Manifest) -> None:
    body = live.http.get("/versions/2").json()
    assert (body["version"], body["parent"], body["digest"]) == (2, 1, digits.digest)
    assert body["classes"] == ["a", "b", "0", "1", "2"]
    assert [task["name"] for task in body["tasks"]] == ["letters", "digits"]
    assert [shard["kind"] for shard in body["shards"]] == ["expert", "expert", "classifier"]


def test_a_version_that_does_not_exist_is_404(live: Live) -> None:
    assert_problem(live.http.get("/versions/3"), 404, says="no version 3")
    assert_problem(live.http.get("/classes?version=3"), 404)
    for name in ("x", "0", "-1", "..%2f..%2fstore.json", "1e0"):
        assert live.http.get(f"/versions/{name}").status_code in (400, 404)


def test_classes_come_in_the_order_of_the_outputs(live: Live) -> None:
    body = live.http.get("/classes").json()
    assert body["version"] == 2
    assert [(one["label"], one["task"]) for one in body["classes"]] == [
        ("a", "letters"),
        ("b", "letters"),
        ("0", "digits"),
        ("1", "digits"),
        ("2", "digits"),
    ]
    assert len(live.http.get("/classes?version=1").json()["classes"]) == 2


def test_ready_says_what_serves(live: Live) -> None:
    answer = live.http.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {
        "version": 2,
        "channel": "production",
        "mode": "follow",
        "record": 2,
        "head": 2,
        "fallback": False,
        "settling": None,
        "backend": "torch",
        "engine": "torch",
        "measuring": False,
        "device": "cpu",
        "canary": None,
        "shadow": None,
        "error": None,
    }


def test_without_a_store_it_is_alive_and_not_ready(tmp_path: Path) -> None:
    with live_server(tmp_path / "absent") as live:
        assert live.http.get("/healthz").status_code == 200
        assert_problem(live.http.get("/readyz"), 503, says="no store yet")
        assert_problem(live.http.get("/versions"), 503)
        assert_problem(live.http.get("/classes"), 503)
        assert str(tmp_path) not in live.http.get("/readyz").text


def test_an_empty_store_is_not_ready_and_lists_nothing(store: Store) -> None:
    with live_server(Path(store.location)) as live:
        assert_problem(live.http.get("/readyz"), 503, says="names no version")
        assert live.http.get("/versions").json()["versions"] == []


def test_a_store_that_appears_is_picked_up(tmp_path: Path) -> None:
    with live_server(tmp_path / "later") as live:
        assert live.http.get("/readyz").status_code == 503
        store = Store.create(str(tmp_path / "later"))
        made = publish_tiny(store)
        store.promote(made.version, channel="production", actor="tests", reason="")
        live.wait_until_ready()
        assert live.predict(png()).json()["version"] == 1


def test_metrics_count_requests_images_and_swaps(live: Live) -> None:
    live.predict(png(), png())
    live.http.get("/nowhere/at/all")
    live.http.get("/versions/1")
    live.admin("/rollback", to=1)
    assert live.metric('dne_requests_total{method="POST",route="/predict",status="200"}') == 1
    assert live.metric('dne_requests_total{method="GET",route="unmatched",status="404"}') == 1
    route = "/versions/{version}"
    assert live.metric(f'dne_requests_total{{method="GET",route="{route}",status="200"}}') == 1
    assert live.metric("dne_images_total") == 2
    assert live.metric("dne_served_version") == 1
    assert live.metric("dne_swaps_total") == 2
    assert live.metric("dne_following") == 1
    assert live.metric("dne_queue_images") == 0


def test_what_is_not_offered_is_a_problem_too(live: Live) -> None:
    assert_problem(live.http.get("/nowhere"), 404, says="/nowhere")
    answer = live.http.get("/predict")
    assert_problem(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_what_nobody_foresaw_is_500_without_its_insides(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("at /secret/path")

    monkeypatch.setattr(live.serving, "open_store", fail)
    answer = live.http.get("/versions")
    assert_problem(answer, 500)
    assert "secret" not in answer.text
    assert answer.json()["instance"] in caplog.text
    assert "/secret/path" in caplog.text


def test_a_version_whose_parent_was_deleted_is_still_shown(live: Live, store: Store) -> None:
    delete_version(store, 1, actor="tests", reason="no longer needed")
    body = live.http.get("/versions/2").json()
    assert (body["version"], body["parent"]) == (2, 1)
    assert [one["version"] for one in live.http.get("/versions").json()["versions"]] == [2]
