"""The Open Inference Protocol as an outside client sees it: tritonclient, with its defaults."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from PIL import Image
from tritonclient.utils import InferenceServerException

from model_store.preprocess import normalise, read_pixels
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.live_server import TOKEN, Live, live_server, png
from tests.tiny_versions import flip_last_bit, promote, publish_tiny

ADMIN = {"Authorization": f"Bearer {TOKEN}"}
ALL_OUTPUTS = ["label", "score", "task", "unknown", "probabilities", "logits"]


@contextmanager
def connected(live: Live, **options: Any) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(live.url.removeprefix("http://"), **options) as client:
        yield client


@pytest.fixture
def client(steady: Live) -> Iterator[triton.InferenceServerClient]:
    with connected(steady) as client:
        yield client


def image_input(*images: bytes, binary: bool = True) -> triton.InferInput:
    given = triton.InferInput("image", [len(images)], "BYTES")
    texts = images if binary else [base64.b64encode(image) for image in images]
    return given.set_data_from_numpy(np.array(texts, dtype=np.object_), binary_data=binary)


def tensor_input(name: str, values: np.ndarray, *, binary: bool = True) -> triton.InferInput:
    datatype = {"uint8": "UINT8", "float32": "FP32"}[str(values.dtype)]
    given = triton.InferInput(name, list(values.shape), datatype)
    return given.set_data_from_numpy(values, binary_data=binary)


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


def test_infer_with_the_clients_defaults_answers_as_predict_does(
    steady: Live, client: triton.InferenceServerClient
) -> None:
    images = [png(seed) for seed in range(9)]
    expected = steady.predict(*images).json()
    result = client.infer("dne", [image_input(*images)], request_id="é ☕")
    response = result.get_response()
    assert (response["model_name"], response["model_version"]) == ("dne", "2")
    assert response["id"] == "é ☕"
    assert [one["name"] for one in response["outputs"]] == ALL_OUTPUTS
    assert all("binary_data_size" in one["parameters"] for one in response["outputs"])
    predictions = expected["predictions"]
    labels = [one.decode() for one in result.as_numpy("label")]
    assert labels == [one["label"] for one in predictions]
    tasks = [one.decode() for one in result.as_numpy("task")]
    assert tasks == [one["task"] for one in predictions]
    scores = [one["score"] for one in predictions]
    np.testing.assert_allclose(result.as_numpy("score"), scores, atol=1e-5)
    assert result.as_numpy("unknown").tolist() == [False] * 9
    assert result.as_numpy("unknown").dtype == np.bool_
    probabilities = result.as_numpy("probabilities")
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(probabilities.max(axis=1), scores, atol=1e-5)
    exps = np.exp(result.as_numpy("logits").astype(np.float64))
    np.testing.assert_allclose(exps / exps.sum(axis=1, keepdims=True), probabilities, atol=1e-5)


def test_json_says_what_binary_says(client: triton.InferenceServerClient) -> None:
    images = [png(seed) for seed in range(3)]
    binary = client.infer("dne", [image_input(*images)])
    wanted = [triton.InferRequestedOutput(name, binary_data=False) for name in ALL_OUTPUTS]
    text = client.infer("dne", [image_input(*images, binary=False)], outputs=wanted)
    for name in ("score", "unknown", "probabilities", "logits"):
        assert text.get_output(name)["data"] is not None
        np.testing.assert_allclose(text.as_numpy(name), binary.as_numpy(name), atol=1e-5)
    for name in ("label", "task"):
        expected = [one.decode() for one in binary.as_numpy(name)]
        assert text.as_numpy(name).tolist() == expected


def test_json_and_binary_outputs_may_be_mixed_and_keep_their_order(
    client: triton.InferenceServerClient,
) -> None:
    wanted = [
        triton.InferRequestedOutput("logits"),
        triton.InferRequestedOutput("label", binary_data=False),
        triton.InferRequestedOutput("score"),
    ]
    result = client.infer("dne", [image_input(png(), png(1))], outputs=wanted)
    names = [one["name"] for one in result.get_response()["outputs"]]
    assert names == ["logits", "label", "score"]
    assert result.as_numpy("logits").shape == (2, 5)
    assert result.as_numpy("label").shape == result.as_numpy("score").shape == (2,)
    assert result.as_numpy("task") is None


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", ["pixels", "pixels_fp32", "normalised"])
def test_pixels_are_answered_like_the_image_that_holds_them(
    steady: Live, client: triton.InferenceServerClient, name: str, binary: bool
) -> None:
    images = [png(seed) for seed in range(4)]
    preprocessing = steady.serving.open_store().manifest(2).preprocessing
    pixels = np.stack([read_pixels(image, preprocessing) for image in images])
    tensors = {
        "pixels": pixels,
        "pixels_fp32": (pixels / 255).astype(np.float32),
        "normalised": normalise(pixels, preprocessing),
    }
    expected = client.infer("dne", [image_input(*images)]).as_numpy("logits")
    found = client.infer("dne", [tensor_input(name, tensors[name], binary=binary)])
    np.testing.assert_allclose(found.as_numpy("logits"), expected, atol=1e-4)


def test_pixels_of_another_size_are_fitted_as_an_image_of_that_size_is(
    client: triton.InferenceServerClient,
) -> None:
    image = png(7, size=21)
    with Image.open(io.BytesIO(image)) as opened:
        pixels = np.asarray(opened)[:, 2:-1]
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG")
    expected = client.infer("dne", [image_input(buffer.getvalue())]).as_numpy("logits")
    found = client.infer("dne", [tensor_input("pixels", pixels[None])]).as_numpy("logits")
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_column_of_images_is_as_good_as_a_row(client: triton.InferenceServerClient) -> None:
    given = triton.InferInput("image", [2, 1], "BYTES")
    given.set_data_from_numpy(np.array([[png()], [png(1)]], dtype=np.object_))
    assert client.infer("dne", [given]).as_numpy("label").shape == (2,)


def test_any_version_answers_and_is_named(client: triton.InferenceServerClient) -> None:
    result = client.infer("dne", [image_input(png())], model_version="1")
    assert result.get_response()["model_version"] == "1"
    assert result.as_numpy("logits").shape == (1, 2)


def test_many_async_requests_get_their_own_answers(steady: Live) -> None:
    images = [png(seed) for seed in range(24)]
    with connected(steady, concurrency=6) as client:
        together = client.infer("dne", [image_input(*images)]).as_numpy("probabilities")
        handles = [
            client.async_infer("dne", [image_input(image)], request_id=str(index))
            for index, image in enumerate(images)
        ]
        for index, handle in enumerate(handles):
            result = handle.get_result()
            assert result.get_response()["id"] == str(index)
            found = result.as_numpy("probabilities")[0]
            np.testing.assert_allclose(found, together[index], atol=1e-5)


@pytest.mark.parametrize("name", ["probabilities", "logits"])
@pytest.mark.parametrize("binary", [True, False])
def test_class_count_asks_for_the_likeliest_classes_by_name(
    client: triton.InferenceServerClient, name: str, binary: bool
) -> None:
    wanted = [triton.InferRequestedOutput(name, binary_data=binary, class_count=2)]
    result = client.infer("dne", [image_input(png(), png(1))], outputs=wanted).as_numpy(name)
    assert result.shape == (2, 2)
    values = client.infer("dne", [image_input(png(), png(1))]).as_numpy(name)
    labels = ["a", "b", "0", "1", "2"]
    for row, texts in zip(values, result, strict=True):
        for text, place in zip(texts, np.argsort(-row), strict=False):
            text = text.decode() if binary else text
            value, index, label = text.split(":")
            assert (int(index), label) == (place, labels[place])
            assert float(value) == pytest.approx(row[place], abs=1e-5)


def test_more_classes_than_there_are_means_all(client: triton.InferenceServerClient) -> None:
    wanted = [triton.InferRequestedOutput("logits", class_count=1000)]
    result = client.infer("dne", [image_input(png())], outputs=wanted)
    assert result.as_numpy("logits").shape == (1, 5)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_read(client: triton.InferenceServerClient, algorithm: str) -> None:
    result = client.infer(
        "dne",
        [image_input(png())],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert result.as_numpy("label").shape == (1,)


def test_parameters_that_mean_nothing_to_a_classifier_do_no_harm(
    client: triton.InferenceServerClient,
) -> None:
    result = client.infer(
        "dne",
        [image_input(png())],
        sequence_id=7,
        sequence_start=True,
        priority=1,
        timeout=10_000_000,
        parameters={"colour": "green"},
    )
    assert result.as_numpy("label").shape == (1,)


def test_refusals_are_shown_as_a_sentence_with_their_status(
    client: triton.InferenceServerClient,
) -> None:
    image = image_input(png())
    refused = {
        r"\[404\] no model 'resnet'": lambda: client.infer("resnet", [image]),
        r"\[404\] there is no version 9": lambda: client.infer("dne", [image], model_version="9"),
        r"\[400\] .*version": lambda: client.infer("dne", [image], model_version="newest"),
        r"\[422\] image 2 of 2": lambda: client.infer("dne", [image_input(png(), b"no image")]),
        r"\[413\] more than 64": lambda: client.infer("dne", [image_input(*[png()] * 65)]),
        r"\[413\] the body has more": lambda: client.infer("dne", [image_input(b"x" * (33 << 20))]),
        r"\[400\] no output 'boxes'": lambda: client.infer(
            "dne", [image], outputs=[triton.InferRequestedOutput("boxes")]
        ),
        r"\[404\] there is no version 3": lambda: client.get_model_metadata("dne", "3"),
        r"\[401\] an Authorization": lambda: client.load_model("dne"),
        r"\[403\] that token is not known": lambda: client.unload_model(
            "dne", headers={"Authorization": "Bearer wrong"}
        ),
    }
    for sentence, call in refused.items():
        with pytest.raises(InferenceServerException, match=f"^{sentence}"):
            call()


def test_a_compressed_bomb_is_413(client: triton.InferenceServerClient) -> None:
    bomb = image_input(b"\0" * (40 << 20))
    with pytest.raises(InferenceServerException, match=r"^\[413\] the body has more"):
        client.infer("dne", [bomb], request_compression_algorithm="gzip")


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


def test_without_an_admin_token_load_and_unload_are_closed(store: Store, letters: Manifest) -> None:
    with live_server(Path(store.location), admin_token=None) as live, connected(live) as client:
        live.wait_until_ready()
        for call in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match=r"^\[403\]"):
                call("dne", headers=ADMIN)
        assert client.is_model_ready("dne")


def test_what_is_not_offered_answers_how_it_stands_and_refuses_changes(
    client: triton.InferenceServerClient,
) -> None:
    assert client.get_trace_settings() == {"trace_level": ["OFF"]}
    assert client.get_trace_settings("dne") == {"trace_level": ["OFF"]}
    assert client.get_log_settings()["log_info"] is True
    assert client.get_system_shared_memory_status() == []
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_system_shared_memory()
    client.unregister_system_shared_memory("region")
    client.unregister_cuda_shared_memory()
    client.unregister_cuda_shared_memory("region")
    shared = triton.InferInput("image", [1], "BYTES").set_shared_memory("region", 8)
    back = triton.InferRequestedOutput("label")
    back.set_shared_memory("region", 8)
    refused = {
        r"\[400\] tracing is not offered": [
            lambda: client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}),
            lambda: client.update_trace_settings("dne", {"trace_level": ["TIMESTAMPS"]}),
        ],
        r"\[400\] the log is set": [lambda: client.update_log_settings({"log_info": False})],
        r"\[404\] no shared memory region": [
            lambda: client.get_system_shared_memory_status("region"),
            lambda: client.get_cuda_shared_memory_status("region"),
        ],
        r"\[400\] shared memory is not offered": [
            lambda: client.register_system_shared_memory("region", "/key", 64),
            lambda: client.register_cuda_shared_memory("region", "handle", 0, 64),
            lambda: client.infer("dne", [shared]),
            lambda: client.infer("dne", [image_input(png())], outputs=[back]),
        ],
    }
    for sentence, calls in refused.items():
        for call in calls:
            with pytest.raises(InferenceServerException, match=f"^{sentence}"):
                call()


def test_the_asyncio_client_works_too(steady: Live) -> None:
    async def ask() -> np.ndarray:
        async with triton_aio.InferenceServerClient(steady.url.removeprefix("http://")) as client:
            assert await client.is_model_ready("dne")
            assert len(await client.get_model_repository_index()) == 2
            result = await client.infer("dne", [image_input(png())])
            return np.asarray(result.as_numpy("logits"))

    assert asyncio.run(ask()).shape == (1, 5)


def test_the_model_may_be_given_the_name_that_clients_know(store: Store, letters: Manifest) -> None:
    with live_server(Path(store.location), model_name="my.model-1") as live:
        live.wait_until_ready()
        with connected(live) as client:
            assert client.is_model_ready("my.model-1")
            assert not client.is_model_ready("dne")
            result = client.infer("my.model-1", [image_input(png())])
            assert result.get_response()["model_name"] == "my.model-1"
