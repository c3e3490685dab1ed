from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dne_serve.errors import DecoderUnavailable, QueueFull
from dne_serve.inference import decoding
from dne_serve.inference.decode_process import DecodeProcess, ImageTooSlow
from dne_serve.inference.decode_worker import BASE_BYTES, BYTES_A_PIXEL
from dne_serve.inference.decoding import DecodePool, Decoder
from model_store.errors import DneError, ImageRejected, ImageTooLarge
from model_store.preprocess import Pixels, read_pixels
from model_store.records.manifest import Preprocessing
from tests.abuse.images import encoded, flat, jpeg_of_many_scans
from tests.abuse.structures import tiff_of_strips, tiff_of_tags
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
    decoder = make_decoder()
    yield decoder
    decoder.stop()


def make_decoder(*, threads: int = 1, seconds: float = 20, max_queue: int = 16) -> Decoder:
    return Decoder(
        threads=threads, seconds=seconds, max_pixels=MOST, max_queue=max_queue, max_images=1
    )


def started(lane: DecodePool) -> bool:
    return any(one._process is not None for one in lane.processes.queue)


def child(process: DecodeProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_a_process_gives_the_same_pixels_as_a_thread(process: DecodeProcess) -> None:
    photo = Image.fromarray(
        np.arange(3 * 90 * 70, dtype=np.uint32).astype(np.uint8).reshape(90, 70, 3)
    )
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF"):
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


@pytest.mark.long
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


def end_while_it_decodes(process: DecodeProcess, signal_number: int) -> Exception:
    """The error of a read whose process gets this signal."""
    process.read(png(), EIGHT)
    pid = child(process)
    os.kill(pid, signal.SIGSTOP)

    async def read() -> Pixels:
        task = asyncio.create_task(asyncio.to_thread(process.read, png(), EIGHT))
        await asyncio.sleep(0.2)
        os.kill(pid, signal_number)
        with suppress(ProcessLookupError):  # SIGKILL does not wait for it
            os.kill(pid, signal.SIGCONT)
        return await task

    with pytest.raises(DneError) as caught:
        asyncio.run(read())
    return caught.value


def test_an_image_that_crashes_its_process_is_refused_and_the_next_one_is_not(
    process: DecodeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    error = end_while_it_decodes(process, signal.SIGSEGV)
    assert isinstance(error, ImageRejected)
    assert "cannot be decoded" in str(error)
    assert "ended the process" in caplog.text
    np.testing.assert_array_equal(process.read(png(), EIGHT), read_pixels(png(), EIGHT))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_from_outside_is_no_fault_of_the_image(
    process: DecodeProcess, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    error = end_while_it_decodes(process, number)
    assert isinstance(error, DecoderUnavailable)
    assert "try again soon" in str(error)
    assert f"was ended by {signal.Signals(number).name}" in caplog.text
    np.testing.assert_array_equal(process.read(png(), EIGHT), read_pixels(png(), EIGHT))


def test_an_image_that_uses_up_the_processor_time_is_too_slow(process: DecodeProcess) -> None:
    assert isinstance(end_while_it_decodes(process, signal.SIGXCPU), ImageTooSlow)


def test_processor_time_is_limited_for_each_image(process: DecodeProcess) -> None:
    process.read(png(), EIGHT)
    soft = int(limit_of(child(process), "Max cpu time"))
    assert 20 < soft <= 20 + 10  # the seconds of the fixture, and what it took to start


def test_a_process_that_cannot_be_started_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    process = DecodeProcess(seconds=5, max_pixels=MOST)
    with monkeypatch.context() as patched:
        patched.setattr("subprocess.Popen", refuse)
        with pytest.raises(DecoderUnavailable, match="cannot be started; try again soon"):
            process.read(png(), EIGHT)
    assert "Resource temporarily unavailable" in caplog.text
    assert process.read(png(), EIGHT).shape == (8, 8, 3)
    process.stop()


def test_a_process_that_ends_at_its_start_is_unavailable_and_its_words_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dne_serve.inference.decode_worker.__name__", "dne_serve.no_such_module")
    with pytest.raises(DecoderUnavailable):
        DecodeProcess(seconds=5, max_pixels=MOST).read(png(), EIGHT)
    assert "no_such_module" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an OOM killer")
def test_decode_processes_are_the_first_to_go_when_memory_is_short(process: DecodeProcess) -> None:
    process.read(png(), EIGHT)
    assert Path(f"/proc/{child(process)}/oom_score_adj").read_text().strip() == "1000"


def test_complaints_of_libraries_are_not_passed_on(
    process: DecodeProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        with pytest.raises(ImageRejected):
            process.read(tiff_of_tags(500), EIGHT)
    assert capfd.readouterr().err == ""
    with pytest.raises(ImageRejected):  # a thread has no such door, and would flood the log
        read_pixels(tiff_of_tags(500), EIGHT)
    assert len(capfd.readouterr().err) > 50_000


def test_memory_is_limited(process: DecodeProcess) -> None:
    process.read(png(), EIGHT)
    assert int(limit_of(child(process), "Max address space")) == BASE_BYTES + BYTES_A_PIXEL * MOST


def limit_of(pid: int, name: str) -> str:
    """The soft limit of a process."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return line.removeprefix(name).split()[0]


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
    assert not started(decoder.large)
    pixels = asyncio.run(decoder.read(large, EIGHT))
    np.testing.assert_array_equal(pixels, read_pixels(large, EIGHT))
    assert started(decoder.large)
    assert not started(decoder.odd)


def test_many_bytes_go_to_a_process_whatever_they_say(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "SMALL_BYTES", 100)
    image = png(size=20)
    np.testing.assert_array_equal(
        asyncio.run(decoder.read(image, EIGHT)), read_pixels(image, EIGHT)
    )
    assert started(decoder.large)


def test_a_tiff_goes_to_a_process_however_small(decoder: Decoder) -> None:
    image = flat(8, 8, mode="L", kind="TIFF")
    np.testing.assert_array_equal(
        asyncio.run(decoder.read(image, EIGHT)), read_pixels(image, EIGHT)
    )
    assert started(decoder.odd)
    assert not started(decoder.large)


@pytest.mark.parametrize("kind", ["jpeg", "tiff"])
def test_a_small_image_that_takes_very_long_is_ended_in_a_process(kind: str) -> None:
    slow = {
        "jpeg": lambda: jpeg_of_many_scans(900, total=100_000),
        "tiff": lambda: tiff_of_strips(20_000),
    }
    decoder = make_decoder(seconds=0.3)
    with pytest.raises(ImageTooSlow):
        asyncio.run(decoder.read(slow[kind](), EIGHT))
    decoder.stop()


@pytest.mark.long
def test_an_odd_image_holds_up_no_other(decoder: Decoder) -> None:
    async def all_three() -> list[str]:
        order: list[str] = []

        async def read(name: str, data: bytes) -> None:
            await decoder.read(data, EIGHT)
            order.append(name)

        await read("odd", odd)
        held = child(decoder.odd.processes.queue[0])
        os.kill(held, signal.SIGSTOP)
        waiting = asyncio.create_task(read("odd", odd))
        await read("small", png())
        await read("large", flat(1001, 1000))
        os.kill(held, signal.SIGCONT)
        await waiting
        return order

    odd = flat(8, 8, mode="L", kind="TIFF")
    assert asyncio.run(all_three()) == ["odd", "small", "large", "odd"]


@pytest.mark.long
def test_only_a_quarter_of_the_queue_is_for_odd_images() -> None:
    """More are refused at once, and take no place from others."""
    decoder = make_decoder(max_queue=8)
    odd = flat(8, 8, mode="L", kind="TIFF")

    async def ask() -> list[object]:
        reading = [decoder.read(odd, EIGHT) for _ in range(5)]
        return list(await asyncio.gather(*reading, return_exceptions=True))

    outcomes = asyncio.run(ask())
    refused = [one for one in outcomes if isinstance(one, QueueFull)]
    assert len(refused) == 3
    assert "2 odd images are waiting" in str(refused[0])
    decoder.stop()


def test_a_usual_photo_is_decoded_in_a_thread(decoder: Decoder) -> None:
    photo = Image.radial_gradient("L").resize((900, 700)).convert("RGB")
    turned = Image.Exif()
    turned[274], turned[0x0110], turned[0x8769] = 6, "a camera", {0x829A: 0.01, 0x9003: "today"}
    for kind, options in (
        ("JPEG", {"exif": turned}),
        ("JPEG", {"exif": turned, "progressive": True, "icc_profile": bytes(3000)}),
        ("PNG", {"exif": turned}),
        ("WEBP", {"exif": turned}),
    ):
        asyncio.run(decoder.read(encoded(photo, kind, **options), EIGHT))
    assert not started(decoder.large)
    assert not started(decoder.odd)


@pytest.mark.parametrize("padding", [0, 1 << 20])
@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF", "WEBP", "JPEG"])
def test_too_many_pixels_are_refused_by_the_header_without_a_process(
    decoder: Decoder, kind: str, padding: int
) -> None:
    data = flat(2100, 2000, mode="L", kind=kind) + b"\0" * padding
    with pytest.raises(ImageTooLarge, match="2100×2000"):
        asyncio.run(decoder.read(data, EIGHT))
    assert not started(decoder.large)
    assert not started(decoder.odd)


@pytest.mark.long
def test_a_large_image_does_not_hold_up_a_small_one(decoder: Decoder) -> None:
    async def both() -> list[str]:
        order: list[str] = []

        async def read(name: str, data: bytes) -> None:
            await decoder.read(data, EIGHT)
            order.append(name)

        await asyncio.gather(read("large", flat(2000, 2000)), read("small", png()))
        return order

    assert asyncio.run(both()) == ["small", "large"]


@pytest.mark.long
def test_stopping_leaves_no_process_behind() -> None:
    decoder = make_decoder(threads=2)
    asyncio.run(decoder.read(flat(1001, 1000), EIGHT))
    asyncio.run(decoder.read(flat(8, 8, mode="L", kind="TIFF"), EIGHT))
    processes = [*decoder.large.processes.queue, *decoder.odd.processes.queue]
    pids = [one._process.pid for one in processes if one._process is not None]
    assert len(pids) == 2
    decoder.stop()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
