"""Few bytes that are many pixels, and few pixels that take long."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dne_serve.settings import load_settings
from tests.abuse.images import (
    BOMBS,
    bmp_of_runs,
    flat,
    gif_of_comments,
    gzip_bomb,
    jpeg_of_many_scans,
    png_of_chunks,
)
from tests.abuse.structures import tiff_of_strips
from tests.abuse.victim import Answer, Client, Victim, detail
from tests.campaigns import AddRow
from tests.live_server import png

WITHIN_S = 0.1
SLACK_BYTES = 64 << 20
SLOW: dict[str, Callable[[], bytes]] = {
    "jpeg, 256 KB of scans": lambda: jpeg_of_many_scans(1000, total=256_000),
    "jpeg, 4 MB of scans": lambda: jpeg_of_many_scans(6000, total=4_000_000),
    "tiff, 120 KB that name two strips": lambda: tiff_of_strips(60_000),
    "gif, 30 MB of comments": lambda: gif_of_comments(total=30_000_000),
    "bmp, 30 MB of runs": lambda: bmp_of_runs(6000, total=30_000_000),
    "png, 30 MB of chunks": lambda: png_of_chunks(total=30_000_000),
}


def bombs() -> dict[str, bytes]:
    made = {name: make() for name, make in BOMBS.items()}
    # Real images, whose pixels would be 231 MB; and one whose header lies far from its beginning.
    made["png, 26 KB of 231 MB"] = flat(8774, 8774, mode="1")
    made["png, padded to 2 MB"] = BOMBS["png"]() + bytes(2_000_000)
    return made


def best_of(client: Client, image: bytes, *, times: int = 5) -> Answer:
    return min((client.predict(image) for _ in range(times)), key=lambda answer: answer.seconds)


def test_bombs_are_refused_before_decoding(victim: Victim) -> None:
    before, decoders = victim.resident_bytes(), victim.decoders()
    victim.forget_peak()
    with Client(victim) as client:
        for name, bomb in bombs().items():
            answer = best_of(client, bomb)
            assert answer.status == 413, (name, answer)
            assert "pixels" in detail(answer)
            assert answer.seconds < WITHIN_S, (name, answer.seconds)
    assert victim.decoders() == decoders
    assert victim.peak_bytes() - before < SLACK_BYTES


def test_a_body_that_unpacks_to_too_much_is_refused(victim: Victim) -> None:
    bomb = gzip_bomb(100 << 20)
    before = victim.resident_bytes()
    victim.forget_peak()
    head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\n"
    with Client(victim) as client:
        for _ in range(3):
            request = f"{head}Content-Length: {len(bomb)}\r\n\r\n".encode() + bomb
            assert client.send(request).status == 413
    limit = load_settings().max_body_bytes
    assert victim.peak_bytes() - before < 2 * limit + SLACK_BYTES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bombs_campaign(victim: Victim, abuse_row: AddRow) -> None:
    before = victim.resident_bytes()
    victim.forget_peak()
    slowest = 0.0
    with Client(victim) as client:
        for name, bomb in bombs().items():
            answers = [client.predict(bomb) for _ in range(50)]
            assert {answer.status for answer in answers} == {413}, name
            taken = sorted(answer.seconds for answer in answers)
            assert taken[len(taken) // 2] < WITHIN_S, (name, taken)
            slowest = max(slowest, taken[len(taken) // 2])
    grown = victim.peak_bytes() - before
    assert grown < SLACK_BYTES
    abuse_row(
        "bombs",
        f"{len(bombs())} bombs, 50 times each",
        f"all 413 before decoding; slowest median {1000 * slowest:.1f} ms, memory at most "
        f"+{grown / 2**20:.0f} MiB",
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_images_that_take_long_are_ended_and_others_answered_meanwhile(
    victim: Victim, abuse_row: AddRow
) -> None:
    limit_s = load_settings().fixed.decode_seconds
    done = threading.Event()
    meanwhile: list[Answer] = []

    def ask_on() -> None:
        with Client(victim) as client:
            while not done.is_set():
                meanwhile.append(client.predict(png(len(meanwhile) % 50)))

    asking = threading.Thread(target=ask_on)
    asking.start()
    try:
        with Client(victim) as client:
            answers = {name: client.predict(make()) for name, make in SLOW.items()}
    finally:
        done.set()
        asking.join()
    # A quick machine decodes some of them within the limit: then the answer is right.
    ended = {name for name, answer in answers.items() if answer.status == 422}
    assert len(ended) >= len(SLOW) / 2, answers
    for name, answer in answers.items():
        assert answer.seconds < limit_s + 4, (name, answer.seconds)
        assert name in ended or (answer.status == 200 and answer.seconds < limit_s), (name, answer)
    assert {answer.status for answer in meanwhile} == {200}
    taken = sorted(answer.seconds for answer in meanwhile)
    p99 = taken[int(len(taken) * 0.99)]
    assert p99 < 1
    abuse_row(
        "images that take long",
        f"{len(answers)}: {'; '.join(answers)}",
        f"{len(ended)} ended with 422, the others decoded in time; slowest "
        f"{max(a.seconds for a in answers.values()):.1f} s (limit {limit_s:g} s); "
        f"{len(meanwhile):,} others answered meanwhile, p99 {1000 * p99:.0f} ms",
    )
