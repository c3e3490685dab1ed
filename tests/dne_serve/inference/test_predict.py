from __future__ import annotations

import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dne_serve.engines.scored import softmax
from model_store.codec import load_network
from model_store.preprocess import normalise, read_pixels
from model_store.records.manifest import Calibration, Manifest
from model_store.records.quality import MAX_TEMPERATURE, MIN_TEMPERATURE
from model_store.store.store import Store
from tests.live_server import Live, assert_problem, live_server, png, wait_for
from tests.tiny_versions import promote, publish_tiny

HOSTILE = Path(__file__).resolve().parents[4] / "shared/data/hostile-images"


def test_many_images_are_answered_in_the_order_sent(steady: Live) -> None:
    body = steady.predict(*map(png, range(9))).json()
    assert body["version"] == 2
    assert [one["filename"] for one in body["predictions"]] == [f"{i}.png" for i in range(9)]
    alone = [steady.predict(png(i)).json()["predictions"][0] for i in range(9)]
    for together, one in zip(body["predictions"], alone, strict=True):
        assert together["label"] == one["label"]
        assert together["score"] == pytest.approx(one["score"], abs=1e-5)
    assert len({one["score"] for one in body["predictions"]}) == 9


def test_scores_are_the_networks_own_probabilities(steady: Live) -> None:
    store = steady.serving.open_store()
    digits = store.manifest(2)
    network = load_network(store.read_shard, digits)
    images = normalise(read_pixels(png(3), digits.preprocessing)[None], digits.preprocessing)
    with torch.inference_mode():
        expected = torch.softmax(network(torch.from_numpy(images))[0].double(), dim=0).numpy()
    [answer] = steady.predict(png(3), query="?top_k=99").json()["predictions"]
    classes = digits.spec.classes
    assert answer["label"] == classes[int(expected.argmax())]
    [task] = (one for one in digits.spec.tasks if answer["label"] in one.classes)
    assert answer["task"] == task.name
    assert answer["unknown"] is False
    found = {one["label"]: one["score"] for one in answer["top"]}
    np.testing.assert_allclose([found[name] for name in classes], expected, atol=1e-5)
    assert [one["score"] for one in answer["top"]] == sorted(found.values(), reverse=True)


def test_a_raw_body_is_one_image_without_a_name(steady: Live) -> None:
    for kind in ("image/png", "application/octet-stream", "IMAGE/JPEG; q=1"):
        answer = steady.http.post("/predict", content=png(), headers={"Content-Type": kind})
        assert answer.status_code == 200, answer.text
        [prediction] = answer.json()["predictions"]
        assert prediction["filename"] is None


@pytest.mark.parametrize(("asked", "given"), [(None, 5), (1, 1), (3, 3), (1000, 5)])
def test_top_k_is_clipped_to_the_classes(steady: Live, asked: int | None, given: int) -> None:
    query = "" if asked is None else f"?top_k={asked}"
    [prediction] = steady.predict(png(), query=query).json()["predictions"]
    assert len(prediction["top"]) == given


def test_an_answer_is_the_same_whether_parameters_are_given_or_left_out(steady: Live) -> None:
    short, long = (steady.predict(png(3), png(4), query=query) for query in ("", "?top_k=5"))
    assert short.content == long.content
    assert short.headers["content-type"] == long.headers["content-type"] == "application/json"


@pytest.mark.parametrize("query", ["?top_k=0", "?top_k=x", "?version=0", "?version=one"])
def test_a_malformed_query_is_400(steady: Live, query: str) -> None:
    assert_problem(steady.predict(png(), query=query), 400, says="query.")


def test_any_version_in_the_store_answers_and_is_named(steady: Live) -> None:
    body = steady.predict(*map(png, range(20)), query="?version=1").json()
    assert body["version"] == 1
    assert {one["label"] for one in body["predictions"]} <= {"a", "b"}
    assert steady.predict(png()).json()["version"] == 2


def test_a_version_that_was_never_promoted_can_be_asked_for(
    live: Live, store: Store, digits: Manifest
) -> None:
    publish_tiny(store, tasks=[("greek", ["alpha"])], parent=digits, seed=5)
    assert live.predict(png(), query="?version=3").json()["version"] == 3


def test_a_version_that_does_not_exist_is_404(steady: Live) -> None:
    assert_problem(steady.predict(png(), query="?version=7"), 404, says="no version 7")


def test_a_request_without_an_image_is_400(steady: Live) -> None:
    boundary = {"Content-Type": "multipart/form-data; boundary=x"}
    assert_problem(steady.http.post("/predict"), 400)
    assert_problem(steady.http.post("/predict", content=b"--x--\r\n", headers=boundary), 400)
    assert_problem(steady.http.post("/predict", content=b"", headers=boundary), 400)


@pytest.mark.parametrize(
    "body",
    [
        b"nonsense",
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\nabc',
        b"--x\r\nno headers at all",
        b"--x\r\nContent-Disposition: form-data\r\n\r\n\r\n--x--\r\n",
    ],
)
def test_a_broken_form_is_400(steady: Live, body: bytes) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert_problem(steady.http.post("/predict", content=body, headers=headers), 400)


def test_a_form_without_a_boundary_is_400(steady: Live) -> None:
    headers = {"Content-Type": "multipart/form-data"}
    assert_problem(steady.http.post("/predict", content=b"--\r\n", headers=headers), 400)


def test_another_field_name_is_400_and_named(steady: Live) -> None:
    answer = steady.http.post("/predict", files={"image": png()})
    assert_problem(answer, 400, says="'image'")


def test_another_content_type_is_415(steady: Live) -> None:
    for kind in ("application/xml", "text/plain", "application/x-www-form-urlencoded"):
        answer = steady.http.post("/predict", content=b"{}", headers={"Content-Type": kind})
        assert_problem(answer, 415, says=kind)


def test_one_bad_image_fails_the_request_and_is_named(steady: Live) -> None:
    files = [("files", ("good.png", png())), ("files", ("bad.txt", b"not an image"))]
    assert_problem(steady.http.post("/predict", files=files), 422, says="image 2 of 2 ('bad.txt')")
    assert steady.predict(png()).status_code == 200


def test_more_images_than_allowed_is_413(steady: Live) -> None:
    most = steady.serving.settings.max_images
    assert steady.predict(*[png()] * most).status_code == 200
    assert_problem(steady.predict(*[png()] * (most + 1)), 413, says=str(most))


def test_limits_hold_while_the_body_streams(store: Store, letters: Manifest) -> None:
    with live_server(Path(store.location), max_body_bytes=10_000, max_pixels=400) as live:
        live.wait_until_ready()
        kind = {"Content-Type": "image/png"}
        chunks = (b"x" * 1000 for _ in range(1000))
        assert_problem(live.http.post("/predict", content=chunks, headers=kind), 413)
        assert_problem(live.http.post("/predict", content=b"x" * 10_001, headers=kind), 413)
        assert_problem(live.predict(png(size=21)), 413, says="21×21")
        assert live.predict(png(size=20)).status_code == 200


def test_a_refusal_reaches_a_client_that_is_still_sending_and_closes_after(steady: Live) -> None:
    """urllib sends all of the body before it listens, and asks for the connection to be closed."""
    much = b"x" * (steady.serving.settings.max_body_bytes + 1)
    request = urllib.request.Request(f"{steady.url}/predict", data=much)
    request.add_header("Content-Type", "image/png")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    with refused.value as answer:
        assert answer.status == 413


def test_a_full_queue_is_503_with_retry_after(store: Store, letters: Manifest) -> None:
    with live_server(Path(store.location), max_queue=4, max_images=4) as live:
        live.wait_until_ready()
        assert live.predict(*map(png, range(4))).status_code == 200
        with ThreadPoolExecutor() as others, live.engine_held():
            waiting = others.submit(live.predict, *map(png, range(3)))
            wait_for(lambda: live.metric("dne_queue_images") == 3)
            answer = live.predict(png(), png())
        assert waiting.result().status_code == 200
        assert_problem(answer, 503)
        assert int(answer.headers["retry-after"]) >= 1
        assert live.predict(png()).status_code == 200


def test_a_full_queue_refuses_before_it_reads_a_body(store: Store, letters: Manifest) -> None:
    with live_server(Path(store.location), max_queue=4, max_images=4) as live:
        live.wait_until_ready()
        with ThreadPoolExecutor() as others, live.engine_held():
            waiting = others.submit(live.predict, *map(png, range(4)))
            wait_for(lambda: live.metric("dne_queue_images") == 4)
            answer = live.http.post(
                "/predict", content=b"?", headers={"Content-Type": "text/plain"}
            )
            assert_problem(answer, 503, says="waiting")
            assert live.http.get("/healthz").status_code == 200  # the connection is still good
        assert waiting.result().status_code == 200


def test_names_of_files_come_back_as_they_were_sent(steady: Live) -> None:
    for name in ("π ☕.png", "<script>.png", "../../etc/passwd"):
        answer = steady.http.post("/predict", files=[("files", (name, png()))])
        assert answer.json()["predictions"][0]["filename"] == name


def test_before_there_is_a_version_predict_is_503(tmp_path: Path) -> None:
    with live_server(tmp_path / "absent") as live:
        answer = live.predict(png())
        assert_problem(answer, 503, says="no version")
        assert "retry-after" in answer.headers


@pytest.mark.skipif(not HOSTILE.is_dir(), reason=f"HOSTILE IMAGES NOT TRIED: no {HOSTILE.name}")
def test_hostile_images_never_fail_the_server(steady: Live) -> None:
    for path in sorted(path for path in HOSTILE.rglob("*") if path.is_file()):
        answer = steady.http.post("/predict", files=[("files", (path.name, path.read_bytes()))])
        expected = (200,) if path.parent.name.startswith("ok-") else (413, 422)
        assert answer.status_code in expected, (path, answer.text)
    assert steady.predict(png()).status_code == 200


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, MAX_TEMPERATURE])
def test_scores_are_finite_at_the_ends_of_the_temperatures(
    store: Store, temperature: float
) -> None:
    promote(store, publish_tiny(store, spread=1e3, temperature=temperature))
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        [prediction] = live.predict(png()).json()["predictions"]
        assert sum(one["score"] for one in prediction["top"]) == pytest.approx(1)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e300])
def test_no_temperature_makes_a_score_that_is_not_finite(temperature: float) -> None:
    """A manifest with such a temperature cannot be read; the arithmetic does not rely on it."""
    with pytest.raises(ValidationError):
        Calibration(temperature=temperature)
    logits = np.array([3e38, -3e38, 0.0, 3e38], dtype=np.float32)
    scores = softmax(logits, temperature=temperature)
    assert np.isfinite(scores).all()
    assert scores.sum() == pytest.approx(1)
