"""Answers that can be questioned: the nearest kept images, another threshold, embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from model_store.loop.corrections import kept_images
from model_store.maintenance.forget import forget_class
from model_store.store.store import Store
from tests.live_server import TOKEN, Live, assert_problem, live_server, png, wait_for
from tests.trained_store import TrainedStore

BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def live(trained_copy: TrainedStore) -> Iterator[Live]:
    with live_server(trained_copy.pretrained, collect="sample=100%") as live:
        live.wait_until_ready()
        yield live


def embeddings(live: Live, *images: bytes) -> Any:
    files = [("files", (f"{place}.png", image)) for place, image in enumerate(images)]
    answer = live.http.post("/embeddings", files=files)
    assert answer.status_code == 200, answer.text
    vectors = np.array([one["embedding"] for one in answer.json()["embeddings"]])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), answer.json()


def nearest(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["predictions"][0]["why"]
    return found


def test_an_image_is_answered_because_it_looks_like_these(
    live: Live, trained_copy: TrainedStore
) -> None:
    store = Store.open(str(trained_copy.pretrained))
    (first, *_) = kept_images(store, store.manifest(2), "0")
    answer = live.predict(first.data, query="?why=5")
    found = nearest(answer)
    assert len(found) == 5
    assert found[0]["image"] == first.sha256
    assert (found[0]["label"], found[0]["name"]) == ("0", "exemplar 1 of 0")
    assert found[0]["similarity"] == pytest.approx(1.0, abs=1e-3)
    similarities = [one["similarity"] for one in found]
    assert similarities == sorted(similarities, reverse=True)
    likely = {one["label"] for one in answer.json()["predictions"][0]["top"][:3]}
    assert {one["label"] for one in found} <= likely
    # The cosine is that of the embeddings that are told.
    data = {
        one.sha256: one.data
        for label in likely
        for one in kept_images(store, store.manifest(2), label)
    }
    vectors, _ = embeddings(live, first.data, data[found[1]["image"]])
    assert vectors[0] @ vectors[1] == pytest.approx(found[1]["similarity"], abs=1e-3)
    assert "why" not in live.predict(first.data).json()["predictions"][0]


def test_a_second_question_computes_only_its_own_image(live: Live) -> None:
    computed = "dne_batch_images_sum"
    nearest(live.predict(png(1), query="?why=3"))
    before = live.metric(computed)
    nearest(live.predict(png(1), query="?why=3"))
    assert live.metric(computed) == before + 1


def test_what_was_forgotten_is_not_named_again(live: Live, trained_copy: TrainedStore) -> None:
    store = Store.open(str(trained_copy.pretrained))
    (image, *_) = kept_images(store, store.manifest(2), "0")
    assert "0" in {one["label"] for one in nearest(live.predict(image.data, query="?why=10"))}
    forget_class(store, "0", actor="tests", reason="asked for")
    assert "0" not in {one["label"] for one in nearest(live.predict(image.data, query="?why=10"))}
    known = live.serving.nearest._known
    assert all(not one.by_image for (_, label), one in known.items() if label == "0")


def test_another_threshold_judges_this_request_alone(live: Live) -> None:
    images = [png(seed) for seed in range(4)]
    plain = live.predict(*images).json()["predictions"]
    scores = [one["unknown_score"] for one in plain]
    middle = sorted(scores)[1]
    asked = live.predict(*images, query=f"?threshold={middle}").json()["predictions"]
    assert [one["unknown"] for one in asked] == [score > middle for score in scores]
    assert [one["unknown_score"] for one in asked] == scores
    assert all(
        not one["unknown"]
        for one in live.predict(*images, query="?threshold=1").json()["predictions"]
    )
    assert [one["unknown"] for one in live.predict(*images).json()["predictions"]] == [
        one["unknown"] for one in plain
    ]


def test_bad_requests_are_told_why(live: Live, trained_copy: TrainedStore) -> None:
    assert_problem(live.predict(png(), query="?why=11"), 400)
    assert_problem(live.predict(png(), query="?threshold=2"), 400)
    assert_problem(
        live.predict(*[png(seed) for seed in range(9)], query="?why=1"), 400, says="at most 8"
    )
    assert_problem(live.http.post("/embeddings"), 400, says="no image")
    assert_problem(live.http.post("/embeddings?version=99", content=png()), 404)
    with live_server(trained_copy.location) as plain:
        plain.wait_until_ready()
        refused = plain.predict(png(), query="?threshold=0.5")
        assert_problem(refused, 400, says="tells no probability of unknown")


def test_the_space_of_embeddings_is_named(live: Live) -> None:
    space = live.http.get("/embeddings").json()
    vectors, told = embeddings(live, png(1), png(1), png(2))
    assert {name: told[name] for name in space} == space
    assert vectors.shape == (3, space["width"])
    assert vectors[0] @ vectors[1] == pytest.approx(1.0, abs=1e-6)
    assert live.http.get("/inbox", headers=BEARER).json()["total"] == 0


def test_items_that_look_alike_are_found(live: Live) -> None:
    live.predict(*(png(seed, size=24) for seed in range(6))).raise_for_status()
    wait_for(lambda: live.http.get("/inbox", headers=BEARER).json()["total"] == 6)
    item = live.http.get("/inbox", headers=BEARER).json()["items"][0]["id"]
    answer = live.http.get(f"/inbox/{item}/alike?limit=3", headers=BEARER)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert len(found["items"]) == 3
    assert item not in {one["item"]["id"] for one in found["items"]}
    similarities = [one["similarity"] for one in found["items"]]
    assert similarities == sorted(similarities, reverse=True)
    assert len(found["kept"]) == 3
    absent = "20261117t120000000-000000000000"
    assert_problem(live.http.get(f"/inbox/{absent}/alike", headers=BEARER), 404)
    assert live.http.get(f"/inbox/{item}/alike").status_code == 401
