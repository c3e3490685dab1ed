"""Images as people send them: every form gives the answer that a form's file gives."""

from __future__ import annotations

import base64
import gzip
import io
import json
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from dne_serve.errors import NotAcceptable
from dne_serve.http.uploads import _from_json, check_accept
from tests.abuse.images import encoded, gzip_bomb
from tests.live_server import Live, assert_problem, png

JSON = {"Content-Type": "application/json"}
PNG = {"Content-Type": "image/png"}
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def scores(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return [one["top"] for one in answer.json()["predictions"]]


def photo() -> Image.Image:
    pixels = np.random.default_rng(5).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((90, 60), Image.Resampling.BICUBIC)


def test_json_with_base64_is_answered_like_a_form(steady: Live) -> None:
    images = [png(1), png(2), png(3)]
    body = {
        "images": [
            b64(images[0]),
            {"data": b64(images[1]), "filename": "two.png"},
            f"data:image/png;base64,{b64(images[2])}",
        ]
    }
    answer = steady.http.post("/predict", json=body)
    assert scores(answer) == scores(steady.predict(*images))
    names = [one["filename"] for one in answer.json()["predictions"]]
    assert names == [None, "two.png", None]


def test_base64_may_have_line_breaks(steady: Live) -> None:
    broken_up = base64.encodebytes(png(1, size=20)).decode()
    assert "\n" in broken_up.strip()
    answer = steady.http.post("/predict", json={"images": [broken_up]})
    assert scores(answer) == scores(steady.predict(png(1, size=20)))


def test_base64_of_many_words_takes_no_string_for_each_of_them(steady: Live) -> None:
    body = json.dumps({"images": ["AB " * (1 << 19)]})
    tracemalloc.start()
    try:
        answer = steady.http.post("/predict", content=body, headers=JSON)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert_problem(answer, 422)
    assert peak < 12 * len(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"images": []}',
        b'{"images": "x"}',
        b'{"images": [1]}',
        b'{"images": ["####"]}',
        b'{"images": ["AAA"]}',
        b'{"images": ["data:image/png,AAAA"]}',
        b'{"images": ["AAAA,AAAA"]}',
        b'{"images": [{"data": "AAAA", "name": "x"}]}',
        b'{"images": ["AAAA"], "more": 1}',
        b'{"files": ["AAAA"]}',
        b"[" * 100_000,
        b'{"images":' * 50_000,
        b"\xff\xfe",
        b'{"images": ["\xff"]}',
        b'{"images": ["\\ud800"]}',
    ],
)
def test_json_that_cannot_be_used_is_400(steady: Live, body: bytes) -> None:
    answer = steady.http.post("/predict", content=body, headers=JSON)
    assert_problem(answer, 400)
    assert len(answer.content) < 2000


def test_base64_of_no_image_is_422_and_named(steady: Live) -> None:
    body = {"images": [b64(png()), {"data": b64(b"text"), "filename": "notes.txt"}]}
    answer = steady.http.post("/predict", json=body)
    assert_problem(answer, 422, says="image 2 of 2 ('notes.txt')")


def test_a_large_json_body_is_never_in_memory_three_times() -> None:
    text = json.dumps({"images": ["AAAA" * (1 << 20), b64(png())]}).encode()
    tracemalloc.start()
    pieces = [text[at : at + (1 << 16)] for at in range(0, len(text), 1 << 16)]
    first, second = _from_json(pieces, max_images=2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(first.data), second.data) == (3 << 20, png())
    assert peak < 2.2 * len(text), peak / len(text)


def test_json_with_too_many_images_is_413_before_it_is_parsed(steady: Live) -> None:
    most = steady.serving.settings.max_images
    assert steady.http.post("/predict", json={"images": [b64(png())] * most}).status_code == 200
    assert_problem(steady.http.post("/predict", json={"images": [b64(png())] * (most + 1)}), 413)
    much = b'{"images": [' + b'"",' * 5_000_000 + b'""]}'
    began = time.monotonic()
    assert_problem(steady.http.post("/predict", content=much, headers=JSON), 413)
    assert time.monotonic() - began < 5


def test_large_json_is_answered_too(steady: Live) -> None:
    image = encoded(photo().resize((300, 300)), "BMP")
    answer = steady.http.post("/predict", json={"images": [b64(image)]})
    assert scores(answer) == scores(steady.predict(image))


@pytest.mark.parametrize("kind", FORMATS)
def test_the_format_is_known_by_its_signature_not_by_its_name(steady: Live, kind: str) -> None:
    image = encoded(photo(), kind)
    by_name = scores(steady.predict(image, names=f"{{}}.{kind.lower()}"))
    for name in ("{}.txt", "{}.png", "{}", "{}.exe"):
        assert scores(steady.predict(image, names=name)) == by_name
    for said in ("image/png", "image/x-nonsense", "application/octet-stream"):
        raw = steady.http.post("/predict", content=image, headers={"Content-Type": said})
        assert scores(raw) == by_name


@pytest.mark.parametrize("kind", ["ICO", "PPM", "TGA", "PCX", "DDS", "PDF", "EPS", "JPEG2000"])
def test_no_other_format_is_opened_at_all(steady: Live, kind: str) -> None:
    image = encoded(photo(), kind)
    assert_problem(steady.predict(image), 422, says="accepted format")


def test_a_photo_that_was_taken_upright_is_seen_upright(steady: Live) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    lying = photo().transpose(Image.Transpose.ROTATE_90)
    plain = encoded(photo(), "PNG")
    assert scores(steady.predict(encoded(lying, "PNG", exif=exif))) == scores(steady.predict(plain))
    assert scores(steady.predict(encoded(lying, "PNG"))) != scores(steady.predict(plain))


def test_the_first_frame_of_an_animation_is_what_counts(steady: Live) -> None:
    first, second = Image.new("P", (8, 8), 3), Image.new("P", (8, 8), 200)
    moving = encoded(first, "GIF", save_all=True, append_images=[second])
    assert scores(steady.predict(moving)) == scores(steady.predict(encoded(first, "GIF")))


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_bodies_may_travel_compressed(steady: Live, coding: str, pack: Any) -> None:
    expected = scores(steady.predict(png(1)))
    raw = steady.http.post(
        "/predict", content=pack(png(1)), headers={**PNG, "Content-Encoding": coding}
    )
    assert scores(raw) == expected
    body = pack(json.dumps({"images": [b64(png(1))]}).encode())
    packed = {**JSON, "Content-Encoding": coding.upper()}
    assert scores(steady.http.post("/predict", content=body, headers=packed)) == expected


def test_a_compressed_form_arrives_in_any_pieces(steady: Live) -> None:
    request = steady.http.build_request("POST", "/predict", files={"files": png(1, size=200)})
    body = gzip.compress(request.read(), mtime=0)
    headers = {"Content-Type": request.headers["Content-Type"], "Content-Encoding": "gzip"}

    def pieces(size: int) -> Iterator[bytes]:
        return (body[at : at + size] for at in range(0, len(body), size))

    expected = scores(steady.predict(png(1, size=200)))
    for size in (1000, 7777, len(body)):
        answer = steady.http.post("/predict", content=pieces(size), headers=headers)
        assert scores(answer) == expected


@pytest.mark.parametrize(
    ("body", "coding", "status"),
    [
        (b"plain", "gzip", 400),
        (gzip.compress(png(), mtime=0)[:-3], "gzip", 400),
        (gzip.compress(png(), mtime=0) + b"x", "gzip", 400),
        (gzip.compress(png(), mtime=0) * 2, "gzip", 400),
        (b"", "gzip", 400),
        (gzip.compress(b"", mtime=0), "gzip", 400),
        (png(), "br", 415),
        (gzip.compress(gzip.compress(png(), mtime=0)), "gzip, gzip", 415),
        (png(), "identity", 200),
    ],
)
def test_what_is_not_what_it_says_is_refused(
    steady: Live, body: bytes, coding: str, status: int
) -> None:
    headers = {**PNG, "Content-Encoding": coding}
    answer = steady.http.post("/predict", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert (answer.headers.get("accept-encoding") == "gzip, deflate") == (status == 415)


def test_a_gzip_bomb_is_413_and_takes_neither_time_nor_memory(steady: Live) -> None:
    bomb = gzip_bomb(64 << 20)
    assert len(bomb) < 100_000
    for kind in (PNG, JSON, {"Content-Type": "multipart/form-data; boundary=x"}):
        began = time.monotonic()
        headers = {**kind, "Content-Encoding": "gzip"}
        answer = steady.http.post("/predict", content=bomb, headers=headers)
        assert answer.status_code in (400, 413), answer.text
        assert time.monotonic() - began < 3
    assert steady.predict(png()).status_code == 200


@pytest.mark.long
def test_what_was_inflated_is_let_go_of(steady: Live) -> None:
    """More than all bodies together may be."""
    packed = gzip.compress(bytes(8 << 20), mtime=0)
    headers = {**PNG, "Content-Encoding": "gzip"}
    for _ in range(80):
        answer = steady.http.post("/predict", content=packed, headers=headers)
        assert_problem(answer, 422)


@pytest.mark.parametrize(
    "accept",
    ["", "*/*", "application/json", "Application/JSON; q=0.5", "text/html, application/*;q=0.1"],
)
def test_whoever_takes_json_gets_it(steady: Live, accept: str) -> None:
    check_accept(accept)
    headers = {"Accept": accept}
    answer = steady.http.post("/predict", files={"files": png()}, headers=headers)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("accept", ["text/html", "image/*", "application/json;q=0", "nonsense"])
def test_whoever_does_not_is_told(steady: Live, accept: str) -> None:
    with pytest.raises(NotAcceptable):
        check_accept(accept)
    answer = steady.http.post("/predict", files={"files": png()}, headers={"Accept": accept})
    assert_problem(answer, 406, says="application/json")


def test_long_answers_travel_compressed_where_that_is_welcome(steady: Live) -> None:
    many = [("files", (f"{i}.png", png(i))) for i in range(64)]
    packed = steady.http.post("/predict", files=many)
    assert packed.headers["content-encoding"] == "gzip"
    plain = steady.http.post("/predict", files=many, headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert packed.json() == plain.json()
    assert "content-encoding" not in steady.predict(png()).headers


def test_an_image_in_pieces_is_one_image(steady: Live) -> None:
    image = png(2, size=100)
    pieces = (image[at : at + 777] for at in range(0, len(image), 777))
    answer = steady.http.post("/predict", content=pieces, headers=PNG)
    assert scores(answer) == scores(steady.predict(image))


def test_transparency_palettes_and_depth_are_answered(steady: Live) -> None:
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK"):
        kind = "TIFF" if mode == "CMYK" else "PNG"
        buffer = io.BytesIO()
        Image.new(mode, (12, 10)).save(buffer, kind)
        assert steady.predict(buffer.getvalue()).status_code == 200, mode
