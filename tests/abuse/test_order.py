"""Answer i belongs to image i: under load, while clients leave, and while batches fail."""

from __future__ import annotations

import asyncio
import io
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from dne_serve.engines.base import Answer, Answers, Query, Resident
from dne_serve.engines.torch_engine import TorchEngine
from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.dne_serve.conftest import publish_digits, publish_letters
from tests.live_server import Live, live_server, png

BAD = 255  # in an image's green: the batch it is in fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request: what its images are, and what becomes of its client."""

    names: tuple[int, ...]
    is_bad: bool
    leaves_after_s: float | None


class Telling(TorchEngine):
    """Its logits say which image it saw. Takes its time, and fails for bad ones."""

    def __init__(self) -> None:
        super().__init__(device="cpu", threads=1)
        self.chance = random.Random(0)
        self.batches = 0

    def run(self, widest: Resident, queries: Sequence[Query]) -> Sequence[Answers | Exception]:
        self.batches += 1
        time.sleep(self.chance.choice((0, 0, 0.001, 0.004)))
        if any(query.pixels[0, 0, 1] == BAD for query in queries):
            raise RuntimeError("a bad image is in the batch")
        return [
            tuple(_answer(int(query.pixels[0, 0, 0]), len(one.labels)) for one in query.residents)
            for query in queries
        ]


def _answer(name: int, classes: int) -> Answer:
    logits = np.zeros(classes, dtype=np.float32)
    logits[0] = name / 32
    return Answer(logits=logits)


def score_of(name: int, *, classes: int) -> float:
    weight = math.exp(name / 32)
    return weight / (weight + classes - 1)


def image_of(name: int, *, is_bad: bool) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (name, BAD if is_bad else 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


REQUESTS = st.lists(
    st.builds(
        Sent,
        names=st.lists(st.integers(1, 250), min_size=1, max_size=9).map(tuple),
        is_bad=st.sampled_from([False, False, False, False, True]),
        leaves_after_s=st.sampled_from([None, None, None, 0.0, 0.002, 0.01]),
    ),
    min_size=1,
    max_size=40,
)


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    store = Store.create(str(tmp_path_factory.mktemp("order") / "models"))
    publish_digits(store, publish_letters(store))
    with live_server(Path(store.location), engine=Telling(), max_batch=8) as live:
        live.wait_until_ready()
        yield live


async def send(http: httpx.AsyncClient, request: Sent) -> httpx.Response | None:
    files = [
        ("files", (f"{name}.png", image_of(name, is_bad=request.is_bad and place == 0)))
        for place, name in enumerate(request.names)
    ]
    with suppress(TimeoutError):
        async with asyncio.timeout(request.leaves_after_s):
            return await http.post("/predict?top_k=99", files=files)
    return None


async def send_all(url: str, requests: Sequence[Sent]) -> list[httpx.Response | None]:
    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as http:
        return await asyncio.gather(*(send(http, request) for request in requests))


def check(request: Sent, answer: httpx.Response | None) -> bool:
    """Whether it was answered; every answer that came is that of its own image."""
    if answer is None or answer.status_code != 200:
        assert answer is None or answer.status_code == 500, answer.text
        return False
    assert not request.is_bad
    predictions = answer.json()["predictions"]
    assert [one["filename"] for one in predictions] == [f"{name}.png" for name in request.names]
    for name, one in zip(request.names, predictions, strict=True):
        scores = {entry["label"]: entry["score"] for entry in one["top"]}
        assert scores["a"] == pytest.approx(score_of(name, classes=5), abs=1e-6)
    return True


def run(live: Live, requests: Sequence[Sent]) -> int:
    answers = asyncio.run(send_all(live.url, requests))
    answered = sum(map(check, requests, answers))
    assert live.predict(png()).status_code == 200  # the loop lives on
    return answered


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=REQUESTS)
def test_every_answer_is_that_of_its_own_image(telling: Live, requests: list[Sent]) -> None:
    run(telling, requests)


def test_without_bad_images_or_impatience_all_are_answered(telling: Live) -> None:
    requests = [
        Sent(names=tuple(range(1 + i, 6 + i)), is_bad=False, leaves_after_s=None) for i in range(40)
    ]
    assert run(telling, requests) == len(requests)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_order_campaign(telling: Live, abuse_row: AddRow) -> None:
    totals = {"requests": 0, "answered": 0, "images": 0}

    @settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(requests=REQUESTS)
    def campaign(requests: list[Sent]) -> None:
        totals["requests"] += len(requests)
        totals["images"] += sum(len(request.names) for request in requests)
        totals["answered"] += run(telling, requests)

    campaign()
    assert totals["answered"] > totals["requests"] / 4
    abuse_row(
        "answer i of image i",
        f"{totals['requests']:,} requests of {totals['images']:,} images: 1 in 5 fails its batch, "
        "half of the clients leave early",
        f"{totals['answered']:,} answered, each with its own images' answers",
    )
