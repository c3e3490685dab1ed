"""The model as the Open Inference Protocol shows it: health, metadata, index, load, statistics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.protocol_v2.triton import connected, image_input
from tests.live_server import TOKEN, Live, live_server, png
from tests.tiny_versions import flip_last_bit, promote, publish_tiny

ADMIN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def client(steady: Live) -> Iterator[triton.InferenceServerClient]:
    with connected(steady) as client:
        yield client


def test_health_is_answered(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("dne")
    assert client.is_model_ready("dne", "2")
    assert not client.is_model_ready("dne", "7")
    assert not client.is_model_ready("resnet")


def test_a_version_is_ready_once_it_is_in_memory(live: Live) -> None:
    with connected(live) as client:
        assert not client.is_model_ready("dne", "1")
        client.infer("dne", [image_input(png())], model_version="1")
        assert client.is_model_ready("dne", "1")


def test_without_a_version_the_server_lives_and_is_not_ready(tmp_path: Path) -> None:
    with live_server(tmp_path / "absent") as live, connected(live) as client:
        assert client.is_server_live()
        assert not client.is_server_ready()
        assert not client.is_model_ready("dne")
        with pytest.raises(InferenceServerException, match=r"\[503\]"):
            client.infer("dne", [image_input(png())])


def test_metadata_names_the_extensions_the_versions_and_the_tensors(
    client: triton.InferenceServerClient,
) -> None:
    server = client.get_server_metadata()
    assert server["name"] == "dne-serve"
    assert {"binary_tensor_data", "classification", "statistics"} <= set(server["extensions"])
    model = client.get_model_metadata("dne")
    assert (model["name"], model["versions"]) == ("dne", ["1", "2"])
    shapes = {one["name"]: (one["datatype"], one["shape"]) for one in model["inputs"]}
    assert shapes == {
        "image": ("BYTES", [-1]),
        "pixels": ("UINT8", [-1, -1, -1, 3]),
        "pixels_fp32": ("FP32", [-1, -1, -1, 3]),
        "normalised": ("FP32", [-1, 3, 8, 8]),
    }
    assert all(one["parameters"]["content"] for one in model["inputs"] + model["outputs"])
    shapes = {one["name"]: (one["datatype"], one["shape"]) for one in model["outputs"]}
    assert shapes["label"] == ("BYTES", [-1])
    assert shapes["probabilities"] == ("FP32", [-1, 5])


def test_a_versions_metadata_and_config_are_its_own(client: triton.InferenceServerClient) -> None:
    for version, labels in (("1", '["a", "b"]'), ("2", '["a", "b", "0", "1", "2"]')):
        config = client.get_model_config("dne", version)
        assert config["parameters"]["labels"]["string_value"] == labels
        classes = len(labels.split(","))
        dims = {one["name"]: one["dims"] for one in config["output"]}
        assert dims["logits"] == [-1, classes]
        outputs = client.get_model_metadata("dne", version)["outputs"]
        assert {one["name"]: one["shape"] for one in outputs}["logits"] == [-1, classes]
    assert client.get_model_config("dne")["parameters"]["version"]["string_value"] == "2"


def test_the_index_lists_every_version_and_what_is_wrong_with_it(live: Live, store: Store) -> None:
    publish_tiny(store, tasks=[("odd", ["x"])], seed=9)
    with connected(live) as client:
        rows = client.get_model_repository_index()
        assert [(one["name"], one["version"]) for one in rows] == [
            ("dne", "1"),
            ("dne", "2"),
            ("dne", "3"),
        ]
        assert {(one["state"], one["reason"]) for one in rows} == {("READY", "")}
        path = Path(store.location, "versions", "00000003.json")
        path.chmod(0o644)
        path.write_bytes(path.read_bytes().replace(b'"odd"', b'"ode"'))
        rows = client.get_model_repository_index()
        assert [one["state"] for one in rows] == ["READY", "READY", "UNAVAILABLE"]
        assert rows[2]["reason"]
        assert not client.is_model_ready("dne", "3")
    ready = live.http.post("/v2/repository/index", json={"ready": True}).json()
    assert [one["version"] for one in ready] == ["1", "2"]


def test_a_head_that_cannot_be_loaded_is_not_ready_and_the_old_version_is(
    live: Live, store: Store
) -> None:
    broken = publish_tiny(store, tasks=[("odd", ["x"])], seed=9)
    flip_last_bit(store, broken.classifier)
    with connected(live) as client:
        promote(store, broken)
        with pytest.raises(InferenceServerException, match=r"^\[503\] channel production cannot"):
            client.load_model("dne", headers=ADMIN)
        assert client.is_model_ready("dne")
        assert client.is_model_ready("dne", "2")
        assert not client.is_model_ready("dne", "3")
        assert client.infer("dne", [image_input(png())]).get_response()["model_version"] == "2"


def test_statistics_count_what_each_version_did_over_all_routes(live: Live) -> None:
    with connected(live) as client:
        [row] = client.get_inference_statistics()["model_stats"]
        assert (row["version"], row["inference_count"]) == ("2", 0)
        client.infer("dne", [image_input(png(), png(1), png(2))])
        live.predict(png())
        client.infer("dne", [image_input(png())], model_version="1")
        with pytest.raises(InferenceServerException):
            client.infer("dne", [image_input(b"no image")])
        first, second = client.get_inference_statistics("dne")["model_stats"]
        assert client.get_inference_statistics("dne", "1")["model_stats"] == [first]
        assert (first["version"], first["inference_count"]) == ("1", 1)
        assert (second["version"], second["inference_count"]) == ("2", 4)
        assert second["execution_count"] == sum(
            one["compute_infer"]["count"] for one in second["batch_stats"]
        )
        spent = second["inference_stats"]
        assert (spent["success"]["count"], spent["fail"]["count"]) == (2, 1)
        assert (spent["queue"]["count"], spent["compute_infer"]["count"]) == (4, 4)
        assert spent["compute_infer"]["ns"] > 0
        assert 0 < spent["compute_input"]["ns"] < spent["success"]["ns"]
        assert second["last_inference"] > 1_700_000_000_000
        with pytest.raises(InferenceServerException, match=r"\[404\]"):
            client.get_inference_statistics("dne", "9")


def test_load_serves_what_the_channel_names_now(store: Store, letters: Manifest) -> None:
    with live_server(Path(store.location), poll_seconds=3600) as live, connected(live) as client:
        live.wait_until_ready()
        promote(store, publish_tiny(store, tasks=[("more", ["c"])], parent=letters, seed=3))
        image = image_input(png())
        assert client.infer("dne", [image]).get_response()["model_version"] == "1"
        client.load_model("dne", headers=ADMIN)
        assert client.infer("dne", [image]).get_response()["model_version"] == "2"


def test_load_brings_the_versions_of_a_policy_into_memory(live: Live) -> None:
    with connected(live) as client:
        assert live.metric("dne_resident_versions") == 1
        policy = '{"version_policy": {"specific": {"versions": [1]}}}'
        client.load_model("dne", headers=ADMIN, config=policy)
        assert live.metric("dne_resident_versions") == 2
        with pytest.raises(InferenceServerException, match=r"\[404\]"):
            client.load_model("dne", headers=ADMIN, config=policy.replace("1", "9"))


@pytest.mark.parametrize(
    "asked",
    [
        {"config": "{"},
        {"config": '{"max_batch_size": 4}'},
        {"config": '{"version_policy": {"latest": {"num_versions": 2}}}'},
        {"config": '{"version_policy": {"specific": {"versions": [0]}}}'},
        {"config": json.dumps({"version_policy": {"specific": {"versions": [1] * 1001}}})},
        {"files": {"file:1/model.onnx": b"abc"}},
    ],
)
def test_load_refuses_what_it_cannot_follow(
    client: triton.InferenceServerClient, asked: dict[str, Any]
) -> None:
    with pytest.raises(InferenceServerException, match=r"^\[400\]"):
        client.load_model("dne", headers=ADMIN, **asked)


def test_an_unloaded_model_is_gone_until_it_is_loaded(live: Live) -> None:
    with connected(live) as client:
        client.unload_model("dne", headers=ADMIN)
        assert client.is_server_live()
        assert not client.is_server_ready()
        assert not client.is_model_ready("dne")
        assert not client.is_model_ready("dne", "1")
        assert {one["state"] for one in client.get_model_repository_index()} == {"UNAVAILABLE"}
        for version in ("", "1", "2"):
            with pytest.raises(InferenceServerException, match=r"^\[503\] the model was unloaded"):
                client.infer("dne", [image_input(png())], model_version=version)
        assert live.http.get("/readyz").status_code == 503
        assert live.predict(png()).status_code == 503
        assert live.metric("dne_served_version") == 0
        assert live.metric("dne_resident_versions") == 0
        client.load_model("dne", headers=ADMIN)
        assert client.is_model_ready("dne")
        assert client.infer("dne", [image_input(png())]).get_response()["model_version"] == "2"
        assert live.metric("dne_served_version") == 2


def test_moving_the_channel_brings_an_unloaded_model_back(live: Live) -> None:
    with connected(live) as client:
        client.unload_model("dne", headers=ADMIN, unload_dependents=True)
        assert live.admin("/rollback", to=1).status_code == 200
        assert client.infer("dne", [image_input(png())]).get_response()["model_version"] == "1"
