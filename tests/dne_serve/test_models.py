"""Many models on one server: found by name, loaded when asked, limited, and let go."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dne_serve.access.permission import new_token
from dne_serve.models import limits_of, parse_limits
from dne_serve.settings import load_settings
from model_store.errors import WrongUsage
from model_store.store.store import Store
from tests.dne_serve.conftest import publish_digits, publish_letters
from tests.dne_serve.every_route import HEADERS, path_of, scoped_routes
from tests.live_server import TOKEN, Live, assert_problem, live_server, png, wait_for
from tests.tiny_versions import promote, publish_tiny

NAMES = ("acme", "acme-eu", "basalt")


def make_store(folder: Path, name: str, *, seed: int = 0) -> Store:
    """Make a model of the classes a and b, whose expert is that of all with the same seed."""
    store = Store.create(str(folder / name))
    promote(store, publish_tiny(store, tasks=[("letters", ["a", "b"])], seed=seed))
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "all"
    folder.mkdir()
    for name in NAMES:
        make_store(folder, name)
    (folder / "no-store").mkdir()
    (folder / "notes.txt").write_text("not a folder")
    return folder


@pytest.fixture
def many(folder: Path) -> Iterator[Live]:
    with live_server("unused", models=str(folder)) as live:
        live.wait_until_ready()
        yield live


def ask(live: Live, name: str, **options: Any) -> httpx.Response:
    return live.http.post(f"/models/{name}/predict", files=[("files", ("a.png", png()))], **options)


def listed(live: Live, query: str = "", **options: Any) -> dict[str, Any]:
    answer: dict[str, Any] = live.http.get(f"/models{query}", **options).json()
    return answer


def test_each_model_answers_below_its_name_and_one_server_lists_them(many: Live) -> None:
    before = listed(many)
    assert [row["name"] for row in before["models"]] == list(NAMES)
    assert [row["loaded"] for row in before["models"]] == [False, False, False]
    answer = ask(many, "acme").json()
    assert answer["version"] == 1
    assert many.http.get("/models/acme/classes").json()["version"] == 1
    assert many.http.get("/models/acme/readyz").json()["version"] == 1
    first = listed(many)["models"][0]
    assert (first["loaded"], first["version"], first["classes"]) == (True, 1, 2)
    assert sum(first["minutes"]) == 3
    assert first["last_use"].startswith("20")


def test_a_server_with_one_store_lists_its_model(steady: Live) -> None:
    answer = listed(steady)
    assert (answer["total"], answer["default"]) == (1, "dne")
    (row,) = answer["models"]
    assert (row["name"], row["loaded"], row["version"], row["classes"]) == ("dne", True, 2, 5)
    assert steady.http.get("/models/dne/classes").status_code == 404


def test_the_list_has_pages_and_a_search(many: Live) -> None:
    assert [row["name"] for row in listed(many, "?search=ACME")["models"]] == ["acme", "acme-eu"]
    page = listed(many, "?limit=2")
    assert (page["total"], page["next_after"]) == (3, "acme-eu")
    rest = listed(many, "?limit=2&after=acme-eu")
    assert [row["name"] for row in rest["models"]] == ["basalt"]
    assert rest["next_after"] is None


def test_models_share_their_experts_and_one_pass(many: Live, folder: Path) -> None:
    make_store(folder, "other", seed=5)
    for name in NAMES:
        ask(many, name).raise_for_status()
    bank = many.models.shared.room.engine.bank  # type: ignore[attr-defined]
    assert bank.experts == 1
    with many.engine_held():
        threads = [threading.Thread(target=ask, args=(many, name)) for name in NAMES]
        for thread in threads:
            thread.start()
        wait_for(lambda: many.models.shared.batcher.depth == len(NAMES))
    for thread in threads:
        thread.join()
    assert many.metric('dne_batch_images_bucket{le="2.0"}') == 3.0
    assert many.metric('dne_batch_images_bucket{le="4.0"}') == 4.0
    ask(many, "other").raise_for_status()
    assert bank.experts == 2


@pytest.mark.parametrize(
    "name", ["nothing", "no-store", "notes.txt", "..", "%2e%2e", ".hidden", "a" * 101, "é", "a b"]
)
def test_a_name_without_a_store_is_not_there(many: Live, name: str) -> None:
    answer = many.http.get(httpx.URL(f"{many.url}/models/{name}/classes"))
    assert answer.status_code == 404, answer.text
    assert many.models.loaded == []


def test_short_routes_say_that_there_are_many_models(many: Live) -> None:
    assert_problem(many.predict(png()), 404, says="ask /models/NAME")
    assert many.http.get("/readyz").json()["loaded"] == 0
    assert_problem(many.http.get("/models/acme/metrics"), 404, says="about the whole server")
    assert_problem(many.http.get("/models/acme/models"), 404, says="about the whole server")


def test_short_routes_ask_the_default(folder: Path) -> None:
    with live_server("unused", models=str(folder), model_name="basalt") as live:
        live.wait_until_ready()
        assert live.predict(png()).json()["version"] == 1
        assert [one.name for one in live.models.loaded] == ["basalt"]
        assert listed(live)["default"] == "basalt"


def test_models_come_and_go_while_the_server_runs(many: Live, folder: Path) -> None:
    ask(many, "acme").raise_for_status()
    make_store(folder, "late")
    assert ask(many, "late").json()["version"] == 1
    shutil.rmtree(folder / "acme")
    wait_for(lambda: [one.name for one in many.models.loaded] == ["late"])
    assert_problem(ask(many, "acme"), 404, says="there is no model 'acme'")
    publish_digits(store := Store.open(str(folder / "late")), store.manifest(1))
    wait_for(lambda: ask(many, "late").json()["version"] == 2)


def test_a_store_that_is_replaced_is_another_model(many: Live, folder: Path) -> None:
    ask(many, "acme").raise_for_status()
    shutil.rmtree(folder / "acme")
    store = Store.create(str(folder / "acme"))
    publish_digits(store, publish_letters(store))
    wait_for(lambda: ask(many, "acme").json().get("version") == 2)


def test_models_stay_while_their_place_is_not_mounted(many: Live, folder: Path) -> None:
    ask(many, "acme").raise_for_status()
    away = folder.with_name("away")
    folder.rename(away)
    folder.mkdir()
    many.serving_of("acme").reloader._next_polls_left = 0
    wait_for(lambda: "vanished" in (many.http.get("/models/acme/readyz").json()["error"] or ""))
    assert ask(many, "acme").json()["version"] == 1
    folder.rmdir()
    away.rename(folder)
    wait_for(lambda: many.http.get("/models/acme/readyz").json()["error"] is None)


def test_a_broken_model_fails_its_own_requests_only(many: Live, folder: Path) -> None:
    for record in (folder / "acme" / "versions").iterdir():
        record.write_bytes(b"{}")
    empty = Store.create(str(folder / "empty"))
    assert empty.versions() == []
    assert_problem(ask(many, "acme"), 503)
    assert_problem(ask(many, "empty"), 503, says="no version is served yet")
    assert ask(many, "basalt").status_code == 200
    rows = {row["name"]: row for row in listed(many)["models"]}
    assert rows["acme"]["error"]
    assert rows["basalt"]["error"] is None


def test_a_copy_with_the_same_id_is_refused_and_a_moved_folder_is_not(
    many: Live, folder: Path
) -> None:
    ask(many, "acme").raise_for_status()
    shutil.copytree(folder / "acme", folder / "twin")
    assert_problem(ask(many, "twin"), 404, says="has the id of model acme")
    (folder / "basalt").rename(folder / "granite")
    assert ask(many, "granite").status_code == 200


def test_the_model_asked_longest_ago_gives_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dne_serve.models._IN_USE_S", 0.0)
    with live_server("unused", models=str(folder), max_models=2) as live:
        live.wait_until_ready()
        for name in ("acme", "acme-eu", "basalt", "acme-eu"):
            ask(live, name).raise_for_status()
        assert [one.name for one in live.models.loaded] == ["basalt", "acme-eu"]
        (cold, *_) = listed(live)["models"]
        assert (cold["name"], cold["loaded"], cold["version"]) == ("acme", False, 1)
        assert ask(live, "acme").status_code == 200


def test_a_model_gives_way_where_bytes_are_limited(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dne_serve.models._IN_USE_S", 0.0)
    make_store(folder, "other", seed=5)
    manifest = Store.open(str(folder / "other")).manifest(1)
    most = sum(ref.bytes for ref in manifest.model_shards) + 1
    with live_server("unused", models=str(folder), max_model_bytes=most) as live:
        live.wait_until_ready()
        for name in ("acme", "other", "acme"):
            assert ask(live, name).status_code == 200
            assert [one.name for one in live.models.loaded] == [name]


def test_a_model_has_its_own_limits(folder: Path, tmp_path: Path) -> None:
    limits = tmp_path / "limits"
    limits.write_text("# model\n* waiting=64 images=2\nbasalt rate=1 images=1  # busy\n")
    with live_server("unused", models=f"{folder},limits={limits}") as live:
        live.wait_until_ready()
        three = [("files", ("a.png", png()))] * 2
        assert live.http.post("/models/acme/predict", files=three).status_code == 200
        assert live.http.post("/models/basalt/predict", files=three).status_code in (400, 413)
        assert_problem(ask(live, "basalt"), 429, says="this model may be asked 1 times a second")
        assert ask(live, "acme").status_code == 200


def test_later_lines_of_the_limits_win_and_a_wrong_line_is_named() -> None:
    rows = parse_limits("* waiting=9\nacme-* rate=2.5\nacme-eu waiting=3", source="f")
    assert limits_of(rows, "acme-eu").waiting == 3
    assert limits_of(rows, "acme-eu").rate == 2.5
    assert limits_of(rows, "basalt").rate is None
    for wrong in ("acme", "acme wait=3", "* waiting=0", "a/b waiting=3", "ac*me rate=2"):
        with pytest.raises(WrongUsage, match="line 1 of f"):
            parse_limits(wrong, source="f")


def test_one_store_or_many_and_not_both(folder: Path) -> None:
    with pytest.raises(WrongUsage, match="not both"):
        load_settings(store="a", models="b")
    with pytest.raises(WrongUsage, match="canary is for one store"):
        load_settings(models="b", canary="1=5%")
    with pytest.raises(WrongUsage, match="limits=FILE"):
        load_settings(models="b,c=d")


def test_an_option_names_one_store_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DNE_MODELS", "everything")
    assert load_settings(store="a").models is None
    assert load_settings().models == "everything"


def test_a_place_that_is_away_at_the_start_is_waited_for(folder: Path) -> None:
    away = folder.with_name("away")
    folder.rename(away)
    with live_server("unused", models=str(folder)) as live:
        wait_for(lambda: "cannot be listed" in live.http.get("/readyz").json()["detail"])
        assert_problem(live.http.get("/models"), 503, says="the models cannot be listed")
        away.rename(folder)
        live.wait_until_ready()
        assert ask(live, "acme").status_code == 200


# Who may


@pytest.fixture
def guarded(folder: Path, tmp_path: Path) -> Iterator[tuple[Live, dict[str, dict[str, str]]]]:
    made = {
        "shop": new_token("shop=predict@acme,read@acme"),
        "eu": new_token("eu=admin@acme-*"),
        "all": new_token("all=predict,read"),
    }
    tokens = tmp_path / "tokens"
    tokens.write_text("\n".join(one.line for one in made.values()))
    with live_server("unused", models=str(folder), token_file=tokens) as live:
        wait_for(lambda: live.http.get("/readyz").status_code == 200)
        yield live, {name: {"Authorization": f"Bearer {one.secret}"} for name, one in made.items()}


def test_a_token_of_one_model_learns_of_no_other(
    guarded: tuple[Live, dict[str, dict[str, str]]],
) -> None:
    live, tokens = guarded
    assert ask(live, "acme", headers=tokens["shop"]).status_code == 200
    for path in ("classes", "versions", "readyz", "live", "v2/models/x/ready"):
        there = live.http.get(f"/models/basalt/{path}", headers=tokens["shop"])
        absent = live.http.get(f"/models/nothing/{path}", headers=tokens["shop"])
        assert there.status_code == absent.status_code == 404
        said = [answer.text.replace("basalt", "nothing") for answer in (there, absent)]
        facts = [json.loads(text) for text in said]
        for one in facts:
            one.pop("instance")
        assert facts[0] == facts[1]
    for path in ("/v2/models/{}", "/v2/models/{}/ready", "/v2/models/{}/versions/1/ready"):
        answers = [
            live.http.get(path.format(name), headers=tokens["shop"]) for name in ("basalt", "no")
        ]
        assert [answer.status_code for answer in answers] == [404, 404]
    assert [one.name for one in live.models.loaded] == ["acme"]
    seen = listed(live, headers=tokens["shop"])
    assert [row["name"] for row in seen["models"]] == ["acme"]
    index = live.http.post("/v2/repository/index", headers=tokens["shop"]).json()
    assert [row["name"] for row in index] == ["acme"]


def test_no_route_tells_a_token_of_another_model_apart_from_one_that_is_not_there(
    guarded: tuple[Live, dict[str, dict[str, str]]],
) -> None:
    live, tokens = guarded
    open_pages = {"/", "/label", "/docs", "/openapi.json"}
    for route in scoped_routes():
        method = next(iter(route.methods or {"GET"}))
        if route.path in open_pages | {"/healthz", "/v2/health/live"}:
            continue
        told = []
        for name in ("basalt", "nothing"):
            path = path_of(route)
            own = path.replace("/models/dne", f"/models/{name}")
            path = own if own != path else f"/models/{name}{path}"
            answer = live.http.request(method, path, headers={**HEADERS, **tokens["shop"]})
            told.append((answer.status_code, _without_id(answer.text, name)))
        assert told[0] == told[1], route.path
        assert told[0][0] in (403, 404), route.path
    assert live.models.loaded == []


def _without_id(text: str, name: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(text.replace(name, "NAME"))
    said.pop("instance")
    return said


def test_a_token_of_models_does_there_what_it_names(
    guarded: tuple[Live, dict[str, dict[str, str]]],
) -> None:
    live, tokens = guarded
    body = {"to": 1}
    moved = live.http.post("/models/acme-eu/promote", json=body, headers=tokens["eu"])
    assert moved.status_code == 200
    refused = live.http.post("/models/acme/promote", json=body, headers=tokens["shop"])
    assert_problem(refused, 403, says="does not have the scope 'admin'")
    assert_problem(live.http.post("/models/acme/promote", json=body, headers=tokens["eu"]), 404)
    assert_problem(live.http.get("/metrics", headers=tokens["shop"]), 403)
    assert live.http.get("/metrics", headers=tokens["all"]).status_code == 200
    assert len(listed(live, headers=tokens["all"])["models"]) == 3


def test_without_a_token_nobody_learns_which_models_there_are(
    guarded: tuple[Live, dict[str, dict[str, str]]],
) -> None:
    live, _ = guarded
    for path in ("readyz", "classes"):
        answers = [live.http.get(f"/models/{name}/{path}") for name in ("acme", "nothing")]
        assert [answer.status_code for answer in answers] == [401, 401]
    assert live.http.get("/models").status_code == 401
    assert live.http.get("/models/nothing/").text == live.http.get("/models/acme/").text


def test_a_wrong_model_in_a_scope_is_wrong_usage() -> None:
    for scope in ("predict@", "predict@*", "predict@a/b", "predict@a*b", "open@acme"):
        with pytest.raises(WrongUsage):
            new_token(f"x={scope}")


# Protocol, records and pages


def test_the_open_inference_protocol_names_models(many: Live) -> None:
    body = {
        "inputs": [
            {"name": "pixels", "datatype": "UINT8", "shape": [1, 8, 8, 3], "data": [0] * 192}
        ]
    }
    name = many.http.get("/v2/models/acme").json()["inputs"][1]["name"]
    body["inputs"][0]["name"] = name
    answer = many.http.post("/v2/models/acme/infer", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model_name"] == "acme"
    index = many.http.post("/v2/repository/index", json={"ready": True}).json()
    assert index == [{"name": "acme", "version": "1", "state": "READY", "reason": ""}]
    assert len(many.http.post("/v2/repository/index").json()) == 3
    assert many.http.get("/v2/models/nothing").status_code == 404
    assert "error" in many.http.get("/v2/models/nothing").json()
    statistics = many.http.get("/v2/models/stats").json()["model_stats"]
    assert [row["name"] for row in statistics] == ["acme"]


def test_metrics_and_the_audit_log_name_the_model(folder: Path, tmp_path: Path) -> None:
    audit = tmp_path / "audit"
    with live_server("unused", models=str(folder), audit_log=audit) as live:
        live.wait_until_ready()
        ask(live, "acme").raise_for_status()
        live.admin("/models/basalt/promote", to=1).raise_for_status()
        assert live.metric('dne_model_images_total{model="acme"}') == 1.0
        assert live.metric("dne_models_loaded") == 2.0
        assert live.metric('dne_unknown_images_total{model="acme",version="1"}') >= 0.0
    line = json.loads(audit.read_text().splitlines()[-1])
    assert (line["action"], line["model"]) == ("POST /promote", "basalt")


def test_the_label_of_models_is_capped(monkeypatch: pytest.MonkeyPatch, many: Live) -> None:
    monkeypatch.setattr("dne_serve.observe.metrics.MAX_MODELS", 1)
    for name in NAMES:
        ask(many, name).raise_for_status()
    assert many.metric('dne_model_images_total{model="acme"}') == 1.0
    assert many.metric('dne_model_images_total{model="(other)"}') == 2.0


def test_the_pages_stand_below_the_models(many: Live) -> None:
    assert "models.js" in many.http.get("/").text
    page = many.http.get("/models/acme", follow_redirects=True)
    assert page.url.path == "/models/acme/"
    assert "console/console.js" in page.text
    assert many.http.get("/models/acme/console/style.css").status_code == 200


# Fair


def test_a_model_that_floods_fills_its_own_share_and_delays_others_by_a_turn(many: Live) -> None:
    for name in NAMES:
        ask(many, name).raise_for_status()
    shared = many.models.shared
    most = many.serving_of("acme").flow.most
    assert most == 64
    answers: list[tuple[str, int]] = []

    def note(name: str) -> None:
        answers.append((name, ask(many, name).status_code))

    with many.engine_held():
        flood = [threading.Thread(target=note, args=("acme",)) for _ in range(most + 8)]
        for thread in flood:
            thread.start()
        wait_for(lambda: len(answers) == 8)
        assert answers == [("acme", 503)] * 8
        wait_for(lambda: shared.batcher.depth == most)
        others = [threading.Thread(target=note, args=(name,)) for name in NAMES[1:]]
        for thread in others:
            thread.start()
        wait_for(lambda: shared.batcher.depth == most + 2)
    for thread in (*flood, *others):
        thread.join()
    assert {status for _, status in answers[8:]} == {200}
    # Both others were in the first batch of sixteen.
    assert {name for name, _ in answers[8 : 8 + 3 * 16]} >= set(NAMES[1:])


def test_admin_of_one_model_moves_that_model(many: Live, folder: Path) -> None:
    store = Store.open(str(folder / "acme"))
    publish_tiny(store, tasks=[("digits", ["0", "1"])], parent=store.manifest(1), seed=1)
    began = time.monotonic()
    answer = many.admin("/models/acme/promote", to=2)
    assert answer.json()["version"] == 2
    assert ask(many, "acme").json()["version"] == 2
    assert many.admin("/models/acme/rollback").json()["version"] == 1
    assert time.monotonic() - began < 20
    assert many.http.get("/models/basalt/versions").json()["served"] == 1
    assert TOKEN not in many.http.get("/models").text
