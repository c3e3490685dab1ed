"""The Open Inference Protocol as an outside client sees it: tritonclient, with its defaults."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from PIL import Image
from tritonclient.utils import InferenceServerException

from model_store.preprocess import normalise, read_pixels
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.protocol_v2.triton import connected, image_input, tensor_input
from tests.live_server import Live, live_server, png

ALL_OUTPUTS = [
    *("label", "score", "task", "unknown", "unknown_score", "probabilities", "logits"),
]


@pytest.fixture
def client(steady: Live) -> Iterator[triton.InferenceServerClient]:
    with connected(steady) as client:
        yield client


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
    tensors: dict[str, np.ndarray] = {
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
        r"\[400\] trace settings cannot be changed": [
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
