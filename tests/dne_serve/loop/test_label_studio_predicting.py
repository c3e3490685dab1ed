"""Label Studio connects, and asks for predictions."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dne_serve.loop.label_studio import as_bearer
from tests.dne_serve.loop.conftest import Backend, basic
from tests.dne_serve.loop.requests_of_1_23 import predict_request, setup_request
from tests.live_server import TOKEN, assert_problem, png

FIXED = """<View><Image name="image" value="$image"/>
<Choices name="class" toName="image"><Choice value="{}"/></Choices></View>"""
BOMB = """<?xml version="1.0"?><!DOCTYPE lolz [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>
<View><Image name="&b;" value="$image"/><Choices name="c" toName="&b;" value="$classes"/></View>"""
OUTSIDE = """<!DOCTYPE v SYSTEM "file:///etc/passwd"><View/>"""


@contextmanager
def listening() -> Iterator[tuple[str, list[bool]]]:
    """A server that nobody should visit, and whether somebody did."""
    visits: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(0.05)
        done = threading.Event()

        def wait() -> None:
            while not done.is_set():
                try:
                    door.accept()[0].close()
                except TimeoutError:
                    continue
                visits.append(True)

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}/cat.png", visits
        finally:
            done.set()
            thread.join()


def test_a_project_connects_with_the_token_as_its_password(backend: Backend) -> None:
    assert backend.ask("health").json() == {"status": "UP", "model_class": "dne-serve"}
    assert backend.ask("setup", setup_request()).json() == {"model_version": "dne-serve-2"}


def test_a_wrong_token_is_refused_and_a_bearer_token_is_taken(backend: Backend) -> None:
    http = backend.live.http
    assert_problem(http.get("/label-studio/health"), 401)
    assert_problem(http.get("/label-studio/health", headers=basic("wrong")), 403)
    assert_problem(http.get("/label-studio/health", headers={"Authorization": "Basic ?"}), 401)
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert http.get("/label-studio/health", headers=bearer).status_code == 200


def test_no_other_route_takes_basic_authentication(backend: Backend) -> None:
    assert_problem(backend.live.http.get("/inbox", headers=basic(TOKEN)), 401)


@pytest.mark.parametrize("password", ["to:ken", "schlüssel"])
def test_a_password_may_have_any_characters(password: str) -> None:
    assert as_bearer(basic(password)["Authorization"]) == f"Bearer {password}"


def test_tasks_of_the_inbox_are_predicted_by_the_served_version(backend: Backend) -> None:
    items = [backend.add(seed) for seed in (1, 2)]
    answer = backend.ask("predict", predict_request(*map(backend.data, items)))
    assert answer.status_code == 200, answer.text
    said = backend.live.predict(png(1), png(2)).json()["predictions"]
    for result, expected in zip(answer.json()["results"], said, strict=True):
        assert result["model_version"] == "dne-serve-2"
        assert result["score"] == pytest.approx(expected["score"])
        (region,) = result["result"]
        assert region["value"] == {"choices": [expected["label"]]}
        names = (region["from_name"], region["to_name"], region["type"])
        assert names == ("class", "image", "choices")


def test_an_answer_of_the_served_version_is_given_again(backend: Backend) -> None:
    item = backend.add(3, version=2)
    (result,) = backend.ask("predict", predict_request(backend.data(item))).json()["results"]
    assert result["score"] == 0.25
    assert result["result"][0]["value"] == {"choices": ["b"]}


def test_an_uploaded_file_is_known_by_the_item_in_its_name(backend: Backend) -> None:
    item = backend.add(4)
    data = {"image": f"/data/upload/3/1234abcd-{item.id}.png"}
    (result,) = backend.ask("predict", predict_request(data)).json()["results"]
    assert result["result"]


def test_a_foreign_image_has_an_error_of_its_own_and_is_not_fetched(backend: Backend) -> None:
    item = backend.add(5)
    gone = backend.add(6)
    backend.inbox.delete(gone.id)
    other = {**backend.data(item), "dne_sha256": "0" * 64}
    with listening() as (address, visits):
        strangers: list[dict[str, Any]] = [
            {"image": address},
            {"image": "file:///etc/passwd", "dne_item": "../../etc/passwd"},
            {"image": 5},
            backend.data(gone),
            other,
        ]
        answer = backend.ask("predict", predict_request(*strangers, backend.data(item)))
        *errors, own = answer.json()["results"]
    assert visits == []
    assert [sorted(one) for one in errors] == [["error"]] * 5
    assert "push" in errors[0]["error"]
    assert gone.id in errors[3]["error"]
    assert "another picture" in errors[4]["error"]
    assert own["result"]


def test_more_tasks_than_images_of_a_request_are_answered(backend: Backend) -> None:
    item = backend.add(7)
    count = 2 * backend.live.serving.settings.max_images + 1
    results = backend.ask("predict", predict_request(*[backend.data(item)] * count)).json()
    assert len(results["results"]) == count
    assert all(one["result"] for one in results["results"])


def test_labellers_predictions_are_not_counted_as_traffic(backend: Backend) -> None:
    """They are of doubtful pictures: the guard would take them for a fault of the version."""

    def counted() -> list[str]:
        lines = backend.live.http.get("/metrics").text.splitlines()
        return [one for one in lines if one.startswith("dne_answered_images_total")]

    item, before = backend.add(8), counted()
    backend.ask("predict", predict_request(backend.data(item)))
    assert counted() == before
    backend.live.predict(png(8))
    assert counted() != before


def test_a_class_that_the_project_does_not_offer_is_an_error(backend: Backend) -> None:
    item = backend.add(9, version=2)
    offered = predict_request(backend.data(item), config=FIXED.format("b"))
    assert backend.ask("predict", offered).json()["results"][0]["result"]
    missing = predict_request(backend.data(item), config=FIXED.format("zebra"))
    (result,) = backend.ask("predict", missing).json()["results"]
    assert "$classes" in result["error"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (BOMB, "document type"),
        (OUTSIDE, "document type"),
        ("<View>", "not XML"),
        ("", "not XML"),
        ("<View/>", "<Choices>"),
        ('<View><Text name="t"/><Choices name="c" toName="t"/></View>', "<Choices>"),
        ("<View>" + "<a>" * 10_000, "not XML"),
        ("<View>" + "<a>" * 200_000, "more than 20,000 tags"),
    ],
)
def test_a_hostile_or_unfit_label_config_is_refused(
    backend: Backend, config: str, says: str
) -> None:
    assert_problem(backend.ask("setup", setup_request(config)), 400, says=says)
    assert_problem(backend.ask("predict", predict_request(config=config)), 400, says=says)


def test_a_body_of_another_form_is_refused(backend: Backend) -> None:
    assert_problem(backend.ask("predict", {"tasks": [{"id": 1}]}), 400)
    assert_problem(backend.ask("setup", {}), 400)
    assert_problem(backend.ask("webhook", {}), 400)
