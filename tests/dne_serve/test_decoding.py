from __future__ import annotations

import asyncio
import io
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dne_serve import decoding
from dne_serve.decode_worker import BASE_BYTES, BYTES_A_PIXEL
from dne_serve.decoding import DecodeProcess, Decoder, ImageTooSlow
from model_store.errors import ImageRejected, ImageTooLarge
from model_store.manifest import Preprocessing
from model_store.preprocess import Pixels, read_pixels
from tests.abuse.images import flat, jpeg_of_many_scans
from tests.live_server import png, wait_for

EIGHT = Preprocessing(image_size=8)
MOST = 4_000_000


@pytest.fixture(scope="module")
def process() -> Iterator[DecodeProcess]:
    process = DecodeProcess(seconds=20, max_pixels=MOST)
    yield process
    process.stop()


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    decoder = Decoder(threads=1, seconds=20, max_pixels=MOST)
    yield decoder
    decoder.stop()


def child(process: DecodeProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_a_process_gives_the_same_pixels_as_a_thread(process: DecodeProcess) -> None:
    photo = Image.fromarray(
        np.arange(3 * 90 * 70, dtype=np.uint32).astype(np.uint8).reshape(90, 70, 3)
    )
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        buffer = io.BytesIO()
        photo.save(buffer, kind)
        for preprocessing in (EIGHT, Preprocessing(image_size=32, interpolation="bilinear")):
            expected = read_pixels(buffer.getvalue(), preprocessing)
            found = process.read(buffer.getvalue(), preprocessing)
            np.testing.assert_array_equal(found, expected)


def test_what_it_refuses_it_refuses_in_the_same_words(process: DecodeProcess) -> None:
    for data in (b"nothing", png()[:50], flat(2001, 2000)):
        with pytest.raises(ImageRejected) as here:
            read_pixels(data, EIGHT, max_pixels=MOST)
        with pytest.raises(type(here.value)) as there:
            process.read(data, EIGHT)
        assert str(there.value) == str(here.value)


def test_an_image_that_takes_too_long_is_refused_in_time_and_the_next_one_is_not() -> None:
    process = DecodeProcess(seconds=1.5, max_pixels=100_000_000)
    process.read(png(), EIGHT)
    first, began = child(process), time.monotonic()
    os.kill(first, signal.SIGSTOP)  # as an image that never ends, on a machine of any speed
    with pytest.raises(ImageTooSlow, match=r"more than 1\.5 s"):
        process.read(png(), EIGHT)
    assert time.monotonic() - began < 6
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert process.read(png(), EIGHT).shape == (8, 8, 3)
    process.stop()


def test_an_image_that_kills_its_process_is_refused_and_the_next_one_is_not(
    process: DecodeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    process.read(png(), EIGHT)
    os.kill(child(process), signal.SIGSTOP)

    async def read() -> Pixels:
        reading = asyncio.to_thread(process.read, png(), EIGHT)
        task = asyncio.create_task(reading)
        await asyncio.sleep(0.2)
        os.kill(child(process), signal.SIGKILL)
        return await task

    with pytest.raises(ImageRejected, match="cannot be decoded"):
        asyncio.run(read())
    assert "ended the process" in caplog.text
    np.testing.assert_array_equal(process.read(png(), EIGHT), read_pixels(png(), EIGHT))


def test_memory_is_limited(process: DecodeProcess) -> None:
    process.read(png(), EIGHT)
    limits = Path(f"/proc/{child(process)}/limits").read_text()
    [line] = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert int(line.split()[3]) == BASE_BYTES + BYTES_A_PIXEL * MOST


def test_the_process_does_not_know_the_servers_secrets(
    process: DecodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DNE_ADMIN_TOKEN", "hush")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    process.stop()
    process.read(png(), EIGHT)
    assert b"hush" not in Path(f"/proc/{child(process)}/environ").read_bytes()


def test_small_images_start_no_process_and_large_ones_do(decoder: Decoder) -> None:
    small, large = png(size=100), flat(1001, 1000)
    asyncio.run(decoder.read(small, EIGHT))
    process = decoder._processes.queue[0]
    assert process._process is None
    pixels = asyncio.run(decoder.read(large, EIGHT))
    np.testing.assert_array_equal(pixels, read_pixels(large, EIGHT))
    assert process._process is not None


def test_many_bytes_go_to_a_process_whatever_they_say(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "SMALL_BYTES", 100)
    image = png(size=20)
    np.testing.assert_array_equal(
        asyncio.run(decoder.read(image, EIGHT)), read_pixels(image, EIGHT)
    )
    assert decoder._processes.queue[0]._process is not None


def test_a_small_jpeg_of_many_scans_goes_to_a_process_and_is_ended_there() -> None:
    decoder = Decoder(threads=1, seconds=0.3, max_pixels=MOST)
    usual = jpeg_of_many_scans(64, total=0)
    assert asyncio.run(decoder.read(usual, EIGHT)).shape == (8, 8, 3)
    assert decoder._processes.queue[0]._process is None
    with pytest.raises(ImageTooSlow):
        asyncio.run(decoder.read(jpeg_of_many_scans(900, total=100_000), EIGHT))
    decoder.stop()


@pytest.mark.parametrize("padding", [0, 1 << 20])
@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF", "WEBP", "JPEG"])
def test_too_many_pixels_are_refused_by_the_header_without_a_process(
    decoder: Decoder, kind: str, padding: int
) -> None:
    data = flat(2100, 2000, mode="L", kind=kind) + b"\0" * padding
    with pytest.raises(ImageTooLarge, match="2100×2000"):
        asyncio.run(decoder.read(data, EIGHT))
    assert decoder._processes.queue[0]._process is None


def test_a_large_image_does_not_hold_up_a_small_one(decoder: Decoder) -> None:
    async def both() -> list[str]:
        order: list[str] = []

        async def read(name: str, data: bytes) -> None:
            await decoder.read(data, EIGHT)
            order.append(name)

        await asyncio.gather(read("large", flat(2000, 2000)), read("small", png()))
        return order

    assert asyncio.run(both()) == ["small", "large"]


def test_stopping_leaves_no_process_behind() -> None:
    decoder = Decoder(threads=2, seconds=5, max_pixels=MOST)
    asyncio.run(decoder.read(flat(1001, 1000), EIGHT))
    pids = [one._process.pid for one in decoder._processes.queue if one._process is not None]
    assert len(pids) == 1
    decoder.stop()
    wait_for(lambda: not Path(f"/proc/{pids[0]}").exists())
