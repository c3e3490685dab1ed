"""Large answers are bounded, hold nobody up, and say what the models say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dne_serve.engines.base import Answer, Resident
from dne_serve.engines.scored import Scored, softmax
from dne_serve.errors import QueueFull
from dne_serve.http.schemas import PredictAnswer, Prediction, Score
from dne_serve.inference import answers
from dne_serve.inference.answers import (
    MAX_TOP_K,
    AnswerBuilder,
    best_of,
    list_json,
    prediction_json,
    work_of,
)
from dne_serve.protocol_v2.images import Encoded
from dne_serve.protocol_v2.infer import pack
from dne_serve.protocol_v2.schemas import InferenceAnswer, ResponseOutput
from model_store.store.store import Store
from tests.live_server import LONG_S, Live, assert_problem, live_server, png, wait_for
from tests.tiny_versions import promote, publish_tiny

CLASSES, IMAGES = 20_000, 64
INFER = "/v2/models/dne/infer"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Serves a version of 20,000 classes, to all tests of this file."""
    store = Store.create(str(tmp_path_factory.mktemp("wide") / "models"))
    classes = [f"class {index:05d}" for index in range(CLASSES)]
    promote(store, publish_tiny(store, tasks=[("many", classes)]))
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        yield live


def resident_of(*labels: str, temperature: float = 1.3, threshold: float = 0.0) -> Resident:
    manifest: Any = SimpleNamespace(
        version=7,
        calibration=SimpleNamespace(temperature=temperature),
        unknown=SimpleNamespace(threshold=threshold, by_class={}),
    )
    model: Any = None
    return Resident(manifest=manifest, labels=labels, tasks=("letters",) * len(labels), model=model)


def logits_of(images: int, classes: int) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    chance = np.random.default_rng(images * classes)
    return list(chance.normal(scale=3, size=(images, classes)).astype(np.float32))


@contextmanager
def builder_held(live: Live) -> Iterator[None]:
    """Inside, the thread that builds large answers is busy."""
    gate, busy = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        gate.wait(LONG_S)

    held = live.serving.answers._thread.submit(hold)
    busy.wait(LONG_S)
    try:
        yield
    finally:
        gate.set()
        held.result(LONG_S)


def pixels_tensor(images: int) -> dict[str, Any]:
    shape = [images, 8, 8, 3]
    data = [0] * (images * 8 * 8 * 3)
    return {"name": "pixels", "datatype": "UINT8", "shape": shape, "data": data}


def infer(live: Live, *, images: int, outputs: list[dict[str, Any]] | None) -> Any:
    body = {"inputs": [pixels_tensor(images)], **({"outputs": outputs} if outputs else {})}
    return live.http.post(INFER, json=body)


def large_prediction(live: Live) -> Any:
    return live.predict(*map(png, range(IMAGES)), query=f"?top_k={MAX_TOP_K}")


def large_inference(live: Live) -> Any:
    wanted = {"name": "logits", "parameters": {"classification": MAX_TOP_K}}
    return infer(live, images=IMAGES, outputs=[wanted])


@pytest.mark.parametrize("ask", [large_prediction, large_inference])
def test_the_event_loop_answers_while_a_large_answer_is_built(wide: Live, ask: Any) -> None:
    with ThreadPoolExecutor() as others:
        with builder_held(wide):
            large = others.submit(ask, wide)
            wait_for(lambda: wide.serving.answers._waiting == 1)
            assert wide.http.get("/healthz").status_code == 200
            assert len(wide.predict(png()).json()["predictions"]) == 1  # small: needs no thread
            assert not large.done()
        answer = large.result(LONG_S)
    assert answer.status_code == 200, answer.text[:300]
    assert answer.text.count("class ") >= IMAGES * MAX_TOP_K


def test_a_large_answer_leaves_the_event_loop_its_turns() -> None:
    resident = resident_of(*(f"class {index}" for index in range(CLASSES)))
    filenames = [f"{i}.png" for i in range(IMAGES)]
    scored = [Scored.of(resident, Answer(logits=row)) for row in logits_of(IMAGES, CLASSES)]
    build = partial(
        prediction_json, resident, canary=False, filenames=filenames, scored=scored, top_k=MAX_TOP_K
    )

    async def count_turns() -> int:
        builder, turns = AnswerBuilder(), 0
        work = work_of(IMAGES, classes=CLASSES, listed=MAX_TOP_K)
        building = asyncio.create_task(builder.build(build, work=work))
        while not building.done():
            await asyncio.sleep(0)
            turns += 1
        builder.stop()
        return turns

    assert asyncio.run(count_turns()) > 10  # built on the loop: 2


def test_only_so_many_large_answers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_LARGE_ANSWERS", 2)

    async def ask_three_times() -> list[Any]:
        builder, gate = AnswerBuilder(), threading.Event()
        building = [
            asyncio.create_task(builder.build(lambda: gate.wait(LONG_S), work=10**9))
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        gate.set()
        outcomes = await asyncio.gather(*building, return_exceptions=True)
        assert await builder.build(lambda: "small", work=1) == "small"
        assert await builder.build(lambda: "large", work=10**9) == "large"
        builder.stop()
        return outcomes

    first, second, third = asyncio.run(ask_three_times())
    assert (first, second) == (True, True)
    assert isinstance(third, QueueFull)


def test_more_labels_than_the_most_are_refused_and_the_most_is_documented(steady: Live) -> None:
    assert_problem(steady.predict(png(), query=f"?top_k={MAX_TOP_K + 1}"), 400, says="query.top_k")
    wanted = {"name": "logits", "parameters": {"classification": MAX_TOP_K + 1}}
    answer = infer(steady, images=1, outputs=[wanted])
    assert answer.status_code == 400
    assert "classification" in answer.json()["error"]
    paths = steady.http.get("/openapi.json").json()["paths"]
    parameters = {one["name"]: one["schema"] for one in paths["/predict"]["post"]["parameters"]}
    assert parameters["top_k"]["maximum"] == MAX_TOP_K
    assert f'"maximum":{MAX_TOP_K}' in str(paths[INFER.replace("dne", "{model}")]).replace(
        "'", '"'
    ).replace(" ", "")


def test_classification_is_clipped_to_the_classes(steady: Live) -> None:
    wanted = {"name": "logits", "parameters": {"classification": MAX_TOP_K}}
    [output] = infer(steady, images=1, outputs=[wanted]).json()["outputs"]
    assert output["shape"] == [1, 5]


def test_json_that_would_be_too_long_is_refused_before_an_image_is_read(wide: Live) -> None:
    with wide.engine_held():  # a request that went on would wait
        refused = infer(wide, images=IMAGES, outputs=None)
    assert refused.status_code == 400
    assert "binary_data" in refused.json()["error"]
    wanted = {"name": "probabilities", "parameters": {"binary_data": True}}
    answer = infer(wide, images=IMAGES, outputs=[wanted])
    assert answer.status_code == 200
    assert len(answer.content) > IMAGES * CLASSES * 4


def test_routes_about_classes_are_written_as_their_models_are(steady: Live) -> None:
    for path in ("/classes", "/classes?version=1", "/versions/1"):
        answer = steady.http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
    schemas = steady.http.get("/openapi.json").json()["components"]["schemas"]
    assert {"ClassesAnswer", "VersionAnswer", "PredictAnswer"} <= schemas.keys()


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(
    labels=st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=12, unique=True),
    filenames=st.lists(st.none() | st.text(max_size=9), min_size=1, max_size=4),
    top_k=st.integers(1, 15),
)
def test_the_json_is_that_of_the_models(
    labels: list[str], filenames: list[str | None], top_k: int
) -> None:
    resident, logits = resident_of(*labels), logits_of(len(filenames), len(labels))
    scored = [Scored.of(resident, Answer(logits=row)) for row in logits]
    written = prediction_json(
        resident, canary=True, filenames=filenames, scored=scored, top_k=top_k
    )
    predictions = []
    for name, row in zip(filenames, logits, strict=True):
        scores = softmax(row, temperature=1.3)
        order = np.argsort(-scores, kind="stable")[:top_k]
        top = [Score(label=labels[index], score=float(scores[index])) for index in order]
        first, is_unknown = top[0], bool(row.max() < 0.0)
        predictions.append(
            Prediction(
                filename=name,
                label=first.label,
                score=first.score,
                level=0,
                task="letters",
                unknown=is_unknown,
                unknown_score=None,
                top=top,
            )
        )
    model = PredictAnswer(version=7, canary=True, predictions=predictions)
    not_asked_for = {"predictions": {"__all__": {"id", "why"}}}  # and nothing is collected
    assert written.decode() == model.model_dump_json(exclude=not_asked_for)


def test_the_protocols_json_is_that_of_its_models() -> None:
    numbers = [0.5, -1e-7, 3.0] * 5000  # several pieces
    heads = [
        ResponseOutput(name="logits", shape=[5000, 3], datatype="FP32"),
        ResponseOutput(
            name="score", shape=[1], datatype="FP32", parameters={"binary_data_size": 4}
        ),
        ResponseOutput(name="label", shape=[2], datatype="BYTES"),
    ]
    texts = ['"quoted"', "ünicode"]
    values = [
        Encoded(data=numbers, binary=None),
        Encoded(data=None, binary=b"abcd"),
        Encoded(data=texts, binary=None),
    ]
    answer = InferenceAnswer(model_name="dne", model_version="3", id="4", outputs=heads)
    filled = [
        head.model_copy(update={"data": one.data}) for head, one in zip(heads, values, strict=True)
    ]
    expected = answer.model_copy(update={"outputs": filled}).model_dump_json(exclude_none=True)
    assert bytes(pack(answer, outputs=values).body) == expected.encode() + b"abcd"
    assert list_json([]) == b"[]"


@given(
    values=st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4]), min_size=1, max_size=40),
    count=st.integers(1, 50),
)
def test_the_best_are_those_of_a_stable_sort(values: list[float], count: int) -> None:
    array = np.array(values)
    expected = np.argsort(-array, kind="stable")[:count]
    assert best_of(array, count).tolist() == expected.tolist()
