"""Small images that take long, sent to a live server: they are ended, and others are answered."""

from __future__ import annotations

import gc
import gzip
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dne_serve.inference.decode_process import DecodeProcess
from dne_serve.inference.decoding import EncodedImage
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.abuse.images import flat
from tests.abuse.structures import tiff_of_strips, tiff_of_tags
from tests.live_server import Live, assert_problem, live_server, png, wait_for

TINY_TIFF = flat(8, 8, mode="L", kind="TIFF")


@pytest.fixture
def narrow(store: Store, letters: Manifest) -> Iterator[Live]:
    """A server with one thread, one process a lane, and little patience."""
    limits: dict[str, Any] = {
        "decode_seconds": 0.5,
        "max_wait_seconds": 5,
        "max_queue": 16,
        "max_images": 13,
    }
    with live_server(Path(store.location), decode_threads=1, **limits) as live:
        live.wait_until_ready()
        yield live


def post(live: Live, body: bytes, **headers: str) -> httpx.Response:
    return live.http.post("/predict", content=body, headers=headers)


@pytest.mark.long
def test_images_are_answered_while_a_few_packed_bytes_would_take_minutes(narrow: Live) -> None:
    packed = gzip.compress(tiff_of_strips(20_000), 9)
    assert len(packed) < 400
    with ThreadPoolExecutor(3) as attackers:
        attacks = [
            attackers.submit(post, narrow, packed, **{"Content-Encoding": "gzip"}) for _ in range(3)
        ]
        meanwhile = [narrow.predict(png()).status_code]
        while not all(attack.done() for attack in attacks):
            meanwhile.append(narrow.predict(png(len(meanwhile))).status_code)
    assert set(meanwhile) == {200}
    answers = [attack.result() for attack in attacks]
    refused = [answer for answer in answers if answer.status_code == 422]
    assert_problem(refused[0], 422, says="more than 0.5 s")
    assert {answer.status_code for answer in answers} <= {422, 503}  # one may wait too long


def test_an_image_that_is_done_does_not_hold_the_place_of_another(narrow: Live) -> None:
    assert narrow.predict(TINY_TIFF).status_code == 200
    [process] = narrow.serving.shared.decoder.odd.processes.queue
    held = pid_of(process)
    os.kill(held, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(narrow.predict, TINY_TIFF, *map(png, range(12)))
        wait_for(lambda: narrow.serving.batcher.reserved == 1)
        assert narrow.predict(*map(png, range(10))).status_code == 200
        os.kill(held, signal.SIGCONT)
        assert slow.result().status_code in (200, 422)  # its half a second may have passed


def pid_of(process: DecodeProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_tags_of_a_tiff_do_not_flood_the_log(
    narrow: Live, capfd: pytest.CaptureFixture[str]
) -> None:
    noisy = tiff_of_tags(580)
    assert len(noisy) < 8000
    for _ in range(5):
        assert_problem(narrow.predict(noisy), 422)
    assert len(capfd.readouterr().err) < 5000


def test_a_process_that_cannot_start_is_503_with_a_time_to_come_back(
    narrow: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("dne_serve.inference.decode_worker.__name__", "dne_serve.no_such_module")
        answer = narrow.predict(flat(1001, 1000))
    assert_problem(answer, 503, says="cannot be started; try again soon")
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["type"] == "urn:dne-serve:problem:decoder-unavailable"
    assert narrow.predict(flat(1001, 1000)).status_code == 200


def uploads_held() -> int:
    return sum(type(one) is EncodedImage for one in gc.get_objects())


@pytest.mark.long
def test_a_request_that_has_waited_too_long_leaves_no_image_behind(
    store: Store, letters: Manifest
) -> None:
    """Not even until Python looks for cycles: nobody would count what is left until then."""
    with live_server(Path(store.location), max_wait_seconds=0.2, decode_seconds=1) as live:
        live.wait_until_ready()
        gc.collect()
        gc.disable()
        try:
            assert_problem(post(live, tiff_of_strips(131_017)), 503, says="has waited")
            wait_for(lambda: uploads_held() == 0)
        finally:
            gc.enable()
