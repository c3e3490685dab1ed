"""Thousands of images go in groups, a bad one fails alone, and order is kept."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from dne_client import AsyncClient, BadImage, BadInput, Outcome
from dne_client.images import ImageFile, Placed, grouped
from tests.dne_client.fake_server import SOON, answer, client_of, refusal

IMAGES = [b"image %d." % place for place in range(40)]


def reply(request: httpx.Request) -> httpx.Response:
    """Answer each image with its own bytes as label; images that end in "7." are bad."""
    found = re.findall(rb"image \d+\.", request.read())
    if any(one.endswith(b"7.") for one in found):
        return refusal(422, detail="bad")
    return answer(*(one.decode() for one in found))


def check(outcomes: list[Outcome]) -> None:
    assert [one.place for one in outcomes] == list(range(40))
    bad = [one.place for one in outcomes if isinstance(one.error, BadImage)]
    assert bad == [7, 17, 27, 37]
    labels = [one.prediction.label for one in outcomes if one.prediction]
    assert labels == [one.decode() for one in IMAGES if not one.endswith(b"7.")]


def test_a_bad_image_fails_alone_and_the_order_is_kept() -> None:
    with client_of(reply) as client:
        check(list(client.predict_many(IMAGES)))


def test_the_client_with_await_does_the_same() -> None:
    async def ask() -> list[Outcome]:
        transport = httpx.MockTransport(reply)
        async with AsyncClient("http://server", transport=transport, retries=SOON) as client:
            return [one async for one in client.predict_many(IMAGES)]

    check(asyncio.run(ask()))


def test_a_file_that_cannot_be_read_does_not_end_the_others(tmp_path: Path) -> None:
    with client_of(reply) as client:
        found = list(client.predict_many([IMAGES[0], tmp_path / "gone.png", IMAGES[1]]))
    assert [one.prediction is not None for one in found] == [True, False, True]
    assert isinstance(found[1].error, BadInput)
    assert "gone.png" in found[1].name


def test_who_stops_reading_stops_the_sending() -> None:
    asked: list[httpx.Request] = []

    def counting(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return reply(request)

    with client_of(counting) as client:
        found = client.predict_many((b"image 1." for _ in range(100_000)), connections=2)
        next(iter(found))
        found.close()  # type: ignore[attr-defined]
    assert len(asked) < 20


@pytest.mark.parametrize(("most", "sizes"), [(4, [4, 4, 2]), (100, [10]), (1, [1] * 10)])
def test_groups_are_full(most: int, sizes: list[int]) -> None:
    images = (
        Placed(place=n, name="x", upload=ImageFile(filename="x", data=b"12345")) for n in range(10)
    )
    assert [len(group) for group in grouped(images, most=most)] == sizes


def test_groups_keep_to_their_bytes_unless_one_image_is_larger() -> None:
    images = [
        Placed(place=n, name="x", upload=ImageFile(filename="x", data=b"1" * size))
        for n, size in enumerate([5, 5, 30, 1, 1])
    ]
    groups = grouped(images, most_bytes=10)
    assert [[one.place for one in group] for group in groups] == [[0, 1], [2], [3, 4]]


def test_no_server_is_one_sentence_for_all_images_and_costs_no_time(tmp_path: Path) -> None:
    for index in range(30):
        (tmp_path / f"{index}.png").write_bytes(b"never sent")
    before = os.times()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "dne_client", "predict", str(tmp_path), "--url", url]
        done = subprocess.run(command, capture_output=True, text=True)
    after = os.times()
    assert done.returncode == 1
    assert done.stdout == ""
    [told] = done.stderr.splitlines()
    assert told.startswith(f"error: no server at {url} (")
    assert told.endswith("start one with `dne-serve`, or name yours with --url or DNE_URL")
    used = after.children_user + after.children_system - before.children_user
    assert used - before.children_system < 1.0  # 0.2 s on a quiet machine
