"""Take image files out of a request: a form's `files`, the raw body, or base64 in JSON."""

from __future__ import annotations

import binascii
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from dne_serve.errors import Malformed, NotAcceptable, TooLarge, TypeNotAccepted
from dne_serve.http.bodies import AT_ONCE_BYTES, check_json
from dne_serve.http.schemas import JsonImage, JsonImages
from dne_serve.inference.decoding import EncodedImage
from model_store.records.sealing import first_reason

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FIELD = "files"
_VALUES_AN_IMAGE = 64
_SPACES = b" \t\n\r\v\f"
_JSON_RANGES = frozenset({"application/json", "application/*", "*/*"})
REFUSED = frozenset({"q=0", "q=0.0", "q=0.00", "q=0.000"})


async def read_uploads(request: Request, *, max_images: int) -> list[EncodedImage]:
    """Read at least one image file, in the order sent. `BodyLimit` limits the bytes of the body."""
    check_accept(request.headers.get("accept", ""))
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind == b"multipart/form-data":
        uploads = await _read_form(request.stream(), options, max_images=max_images)
    elif kind == b"application/json":
        pieces = [piece async for piece in request.stream()]
        if sum(map(len, pieces)) <= AT_ONCE_BYTES:
            uploads = _from_json(pieces, max_images=max_images)
        else:
            uploads = await run_in_threadpool(_from_json, pieces, max_images=max_images)
    elif kind in (b"", b"application/octet-stream") or kind.startswith(b"image/"):
        body = b"".join([chunk async for chunk in request.stream()])
        uploads = [EncodedImage(filename=None, data=body)] if body else []
    else:
        raise TypeNotAccepted(
            f"Content-Type {kind.decode('latin-1')[:100]!r} is not accepted: send "
            f"multipart/form-data with {FIELD!r}, application/json with 'images', or one image as "
            "image/* or application/octet-stream"
        )
    if not uploads:
        raise Malformed("the request holds no image")
    return uploads


def check_accept(header: str) -> None:
    """Refuse a client that does not accept JSON, before its body is read."""
    ranges = [entry.partition(";") for entry in header.lower().split(",") if entry.strip()]
    if ranges and not any(
        kind.strip() in _JSON_RANGES and parameters.replace(" ", "") not in REFUSED
        for kind, _, parameters in ranges
    ):
        raise NotAcceptable(f"answers are application/json, which {header[:100]!r} does not accept")


def _from_json(pieces: list[bytes], *, max_images: int) -> list[EncodedImage]:
    """Empty `pieces`, so that a large body does not stay in memory beside its images."""
    body = b"".join(pieces)
    pieces.clear()
    # Three bytes can be an element of a list that takes fifty in memory. Base64 has no commas.
    most = _VALUES_AN_IMAGE * (max_images + 1)
    if body.count(b",") > most:
        raise TooLarge(f"more than {max_images} images in one request, or far too many values")
    try:
        check_json(body, max_values=2 * most)
    except TooLarge as error:
        raise Malformed(f"the JSON body cannot be used: {error}") from error
    try:
        images = JsonImages.model_validate_json(body).images
    except ValidationError as error:
        raise Malformed(f"the JSON body cannot be used: {first_reason(error)}") from error
    del body
    if len(images) > max_images:
        raise TooLarge(f"more than {max_images} images in one request")
    return [_from_base64(image, place=place) for place, image in enumerate(images, start=1)]


def _from_base64(image: JsonImage | str, *, place: int) -> EncodedImage:
    """Decode base64, also with line breaks or after the beginning of a data URL."""
    given = JsonImage(data=image) if isinstance(image, str) else image
    head, comma, encoded = given.data.partition(",")
    if comma and not (head.startswith("data:") and head.endswith(";base64")):
        raise Malformed(f"image {place} is not base64")
    try:
        data = binascii.a2b_base64(_without_spaces(encoded if comma else head), strict_mode=True)
    except ValueError as error:
        raise Malformed(f"image {place} is not base64") from error
    return EncodedImage(filename=given.filename, data=data)


def _without_spaces(text: str) -> str | bytes:
    """Copy a text only if there are spaces in it. `split` would make a string of every word, and a
    body may have ten million."""
    if not any(space in text for space in _SPACES.decode()):
        return text
    return text.encode("ascii").translate(None, delete=_SPACES)


async def _read_form(
    chunks: AsyncIterator[bytes], options: dict[bytes, bytes], *, max_images: int
) -> list[EncodedImage]:
    form = _Form(max_images=max_images)
    try:
        parser = MultipartParser(options.get(b"boundary", b""), form.callbacks())
        async for chunk in chunks:
            parser.write(chunk)
        parser.finalize()
    except FormParserError as error:
        raise Malformed("the multipart body cannot be read") from error
    if not form.ended:
        raise Malformed("the multipart body ends too early")
    return form.uploads


@dataclass(slots=True)
class _Part:
    header: bytes = b""
    """Name of the header that is being read."""
    value: bytes = b""
    disposition: bytes = b""
    filename: str | None = None
    data: bytearray = field(default_factory=bytearray)


class _Form:
    """Collects the parts of a form from the parser's callbacks."""

    def __init__(self, *, max_images: int) -> None:
        self.uploads: list[EncodedImage] = []
        self.ended = False
        self._max_images = max_images
        self._part = _Part()

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        if len(self.uploads) == self._max_images:
            raise TooLarge(f"more than {self._max_images} images in one request")
        self._part = _Part()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._part.header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.value += data[start:end]

    def _on_header_end(self) -> None:
        if self._part.header.lower() == b"content-disposition":
            self._part.disposition = self._part.value
        self._part.header = self._part.value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._part.disposition)
        name = _text(options.get(b"name", b""))
        if name != FIELD:
            raise Malformed(f"the form's field {name[:100]!r} is not known: send {FIELD!r}")
        if b"filename" in options:
            self._part.filename = _text(options[b"filename"])

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._part.data += data[start:end]

    def _on_part_end(self) -> None:
        self.uploads.append(EncodedImage(filename=self._part.filename, data=bytes(self._part.data)))

    def _on_end(self) -> None:
        self.ended = True


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
