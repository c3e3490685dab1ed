"""The Open Inference Protocol by its bytes: what a client may send, and what is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from model_store.records.manifest import Manifest
from model_store.records.signing import Keys, Trust, new_signer, save_trust
from model_store.store.store import Store
from tests.dne_serve.protocol_v2.v2_requests import (
    INFER,
    LENGTH,
    assert_error,
    image_tensor,
    infer,
)
from tests.live_server import Live, live_server, png, wait_for
from tests.tiny_versions import promote, publish_tiny


def test_plain_json_is_enough(steady: Live) -> None:
    answer = infer(steady, image_tensor(png(3)), id="42", outputs=[{"name": "score"}])
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert LENGTH not in answer.headers
    body = answer.json()
    [expected] = steady.predict(png(3)).json()["predictions"]
    [output] = body.pop("outputs")
    assert body == {"model_name": "dne", "model_version": "2", "id": "42"}
    assert (output["name"], output["datatype"], output["shape"]) == ("score", "FP32", [1])
    assert output["data"] == [pytest.approx(expected["score"], abs=1e-5)]


def test_an_id_that_was_not_sent_does_not_come_back(steady: Live) -> None:
    assert "id" not in infer(steady, image_tensor(png())).json()


def test_binary_answers_say_where_the_json_ends(steady: Live) -> None:
    answer = infer(steady, image_tensor(png(), png(1)), parameters={"binary_data_output": True})
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers[LENGTH])
    outputs = json.loads(answer.content[:length])["outputs"]
    sizes = [output["parameters"]["binary_data_size"] for output in outputs]
    assert length + sum(sizes) == len(answer.content)
    assert "data" not in outputs[0]


def test_an_output_may_say_otherwise_than_the_request(steady: Live) -> None:
    answer = infer(
        steady,
        image_tensor(png()),
        parameters={"binary_data_output": True},
        outputs=[{"name": "label", "parameters": {"binary_data": False}}],
    )
    assert answer.json()["outputs"][0]["data"][0] in ["a", "b", "0", "1", "2"]


def test_a_body_that_is_all_one_image_needs_no_json(steady: Live) -> None:
    answer = steady.http.post(INFER, content=png(3), headers={LENGTH: "0"})
    assert answer.status_code == 200, answer.text
    label = next(one for one in answer.json()["outputs"] if one["name"] == "label")
    assert label["data"] == [steady.predict(png(3)).json()["predictions"][0]["label"]]


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "image/png", None])
def test_the_bytes_count_and_not_their_type(steady: Live, kind: str | None) -> None:
    content = json.dumps({"inputs": [image_tensor(png())]}).encode()
    headers = {"Content-Type": kind} if kind else {}
    assert steady.http.post(INFER, content=content, headers=headers).status_code == 200


def test_nulls_count_as_left_out(steady: Live) -> None:
    tensor = image_tensor(png(), parameters=None)
    answer = infer(steady, tensor, id=None, parameters=None, outputs=None)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["outputs"]) == 7


def test_nested_and_flat_data_are_the_same(steady: Live) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3))
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": list(pixels.shape)}
    answers = [
        infer(steady, {**tensor, "data": data}, outputs=[{"name": "logits"}])
        for data in (pixels.tolist(), pixels.ravel().tolist())
    ]
    first, second = [answer.json()["outputs"][0]["data"] for answer in answers]
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_a_full_queue_is_503_with_retry_after(store: Store, letters: Manifest) -> None:
    with live_server(Path(store.location), max_queue=4, max_images=4) as live:
        live.wait_until_ready()
        with ThreadPoolExecutor() as others, live.engine_held():
            waiting = others.submit(infer, live, image_tensor(*map(png, range(3))))
            wait_for(lambda: live.metric("dne_queue_images") == 3)
            answer = infer(live, image_tensor(png(), png()))
        assert waiting.result().status_code == 200
        assert_error(answer, 503, says="waiting")
        assert int(answer.headers["retry-after"]) >= 1


def test_a_request_keeps_the_version_it_began_with(live: Live) -> None:
    """The channel moves while three images wait: all three are answered by the old version."""
    live.predict(png(), query="?version=1")  # so that moving needs nothing of the engine
    with ThreadPoolExecutor() as others, live.engine_held():
        waiting = others.submit(infer, live, image_tensor(*map(png, range(3))))
        wait_for(lambda: live.metric("dne_queue_images") == 3)
        assert live.admin("/rollback", to=1).status_code == 200
    body = waiting.result().json()
    assert body["model_version"] == "2"
    shapes = {output["name"]: output["shape"] for output in body["outputs"]}
    assert shapes["logits"] == [3, 5]
    assert infer(live, image_tensor(png())).json()["model_version"] == "1"


def test_requests_that_wait_when_a_model_is_unloaded_are_answered(live: Live) -> None:
    """By the version they began with; those that come later are refused at once."""
    with ThreadPoolExecutor() as others:
        with live.engine_held():
            waiting = [others.submit(live.predict, png(seed)) for seed in range(3)]
            wait_for(lambda: live.metric("dne_queue_images") == 3)
            unloading = others.submit(live.admin, "/v2/repository/models/dne/unload")
            wait_for(lambda: live.http.get("/readyz").status_code == 503)
            assert live.predict(png()).status_code == 503
        assert unloading.result().status_code == 200
        answers = [one.result() for one in waiting]
        assert [one.status_code for one in answers] == [200] * 3
        assert {one.json()["version"] for one in answers} == {2}
        assert live.admin("/v2/repository/models/dne/load").status_code == 200
        again = [live.predict(png(seed)) for seed in range(3)]
        assert [label_of(one) for one in again] == [label_of(one) for one in answers]


def label_of(answer: httpx.Response) -> str:
    label: str = answer.json()["predictions"][0]["label"]
    return label


def test_versions_that_nobody_signed_are_not_ready_where_signatures_are_required(
    store: Store, tmp_path: Path
) -> None:
    ann = new_signer(tmp_path / "ann.pem")
    save_trust(tmp_path / "trust.json", Trust({"ann": ann.public}))
    signing = Store.open(store.location, keys=Keys(signer=ann))
    signed = promote(signing, publish_tiny(store, signer=ann))
    publish_tiny(store, tasks=[("more", ["c"])], parent=signed, seed=3)
    settings: dict[str, Any] = {"require_signatures": True, "trust": tmp_path / "trust.json"}
    with live_server(Path(store.location), **settings) as live:
        live.wait_until_ready()
        rows = live.http.post("/v2/repository/index").json()
        assert [one["state"] for one in rows] == ["READY", "UNAVAILABLE"]
        assert "not signed" in rows[1]["reason"]
        assert live.http.get("/v2/models/dne/versions/1/ready").status_code == 200
        assert live.http.get("/v2/models/dne/versions/2/ready").status_code == 404
