"""A client that names the oldest version it takes never gets an older answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.protocol_v2.v2_requests import INFER, assert_error, image_tensor
from tests.live_server import Live, assert_problem, live_server, png, wait_for

HEADER = "Dne-At-Least"


def predict(live: Live, at_least: str, *, query: str = "") -> int:
    answer = live.http.post(f"/predict{query}", content=png(), headers={HEADER: at_least})
    return int(answer.json()["version"]) if answer.status_code == 200 else answer.status_code


@pytest.mark.parametrize("query", ["", "?top_k=1"])
def test_the_served_version_answers_if_it_is_young_enough(steady: Live, query: str) -> None:
    assert predict(steady, "1", query=query) == 2
    assert predict(steady, "2", query=query) == 2
    assert predict(steady, "3", query=query) == 503


def test_the_refusal_says_what_is_served_and_when_to_come_back(steady: Live) -> None:
    answer = steady.http.post("/predict", content=png(), headers={HEADER: "7"})
    assert_problem(answer, 503, says="version 2 is served here, and version 7 or a younger one")
    assert answer.headers["retry-after"] == "1"


def test_a_session_waits_for_the_release_and_refuses_the_rollback(live: Live) -> None:
    live.admin("/rollback", to=1)
    assert predict(live, "2") == 503
    live.admin("/promote", to=2)
    assert predict(live, "2") == 2


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-1", "1.5", "+2", "²", "9" * 5000, "0" * 19 + "79999"]
)
def test_anything_but_a_version_is_malformed(steady: Live, text: str) -> None:
    headers = {HEADER.encode(): text.encode()}
    answer = steady.http.post("/predict", content=png(), headers=headers)
    assert_problem(answer, 400, says=HEADER)


def test_a_version_that_is_named_has_to_be_young_enough(steady: Live) -> None:
    assert predict(steady, "1", query="?version=1") == 1
    answer = steady.http.post("/predict?version=1", content=png(), headers={HEADER: "2"})
    assert_problem(answer, 400, says="version 1 was asked for, and at least version 2")


def test_a_canary_that_is_too_old_does_not_answer(store: Store, digits: Manifest) -> None:
    with live_server(Path(store.location), canary="1=100%") as live:
        wait_for(lambda: live.http.get("/readyz").json().get("canary") == 1)
        assert predict(live, "1") == 1
        assert predict(live, "2") == 2


def test_the_open_inference_protocol_knows_the_header(steady: Live) -> None:
    body = {"inputs": [image_tensor(png())]}
    assert steady.http.post(INFER, json=body, headers={HEADER: "2"}).status_code == 200
    answer = steady.http.post(INFER, json=body, headers={HEADER: "3"})
    assert_error(answer, 503, says="version 3 or a younger one was asked for")


def test_the_header_is_in_the_interface_description(steady: Live) -> None:
    paths = steady.http.get("/openapi.json").json()["paths"]
    for path in ("/predict", "/v2/models/{model}/infer"):
        named = [one["name"] for one in paths[path]["post"]["parameters"]]
        assert named.count(HEADER) == 1
