"""The images of a request: a multipart form's `files`, or the raw body. Bytes, not pixels yet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from dne_serve.problems import Malformed, TooLarge, TypeNotAccepted
from model_store.manifest import Preprocessing
from model_store.preprocess import Pixels, read_pixels

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FIELD = "files"


class Picture(Protocol):
    """One image of a request, in whatever form it came."""

    @property
    def filename(self) -> str | None: ...

    def read(self, preprocessing: Preprocessing, *, max_pixels: int) -> Pixels:
        """The pixels that the network sees; ImageRejected when there are none. Takes its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An image file."""

    filename: str | None
    data: bytes

    def read(self, preprocessing: Preprocessing, *, max_pixels: int) -> Pixels:
        return read_pixels(self.data, preprocessing, max_pixels=max_pixels)


async def read_uploads(request: Request, *, max_images: int) -> list[Upload]:
    """In the order sent; at least one. The bytes of the body are limited elsewhere."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind == b"multipart/form-data":
        uploads = await _read_form(request.stream(), options, max_images=max_images)
    elif kind in (b"", b"application/octet-stream") or kind.startswith(b"image/"):
        body = b"".join([chunk async for chunk in request.stream()])
        uploads = [Upload(filename=None, data=body)] if body else []
    else:
        raise TypeNotAccepted(
            f"Content-Type {kind.decode('latin-1')[:100]!r} is not accepted: send "
            f"multipart/form-data with {FIELD!r}, or one image as image/* or "
            "application/octet-stream"
        )
    if not uploads:
        raise Malformed("the request holds no image")
    return uploads


async def _read_form(
    chunks: AsyncIterator[bytes], options: dict[bytes, bytes], *, max_images: int
) -> list[Upload]:
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
    """Collects the parts that the parser reports."""

    def __init__(self, *, max_images: int) -> None:
        self.uploads: list[Upload] = []
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
        self.uploads.append(Upload(filename=self._part.filename, data=bytes(self._part.data)))

    def _on_end(self) -> None:
        self.ended = True


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
