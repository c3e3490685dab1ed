"""A stand-in for the training API of Azure Custom Vision: tagged images, page by page."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

KEY, PROJECT = "a-training-key", "7f0c"
IMAGES = f"/customvision/v3.3/training/projects/{PROJECT}/images/tagged"
LARGEST_PAGE = 256


class _Project(ThreadingHTTPServer):
    photos: dict[str, tuple[str, Path]]
    """By id: the tag and the file of an image."""

    def page(self, *, take: int, skip: int) -> list[dict[str, object]]:
        url = f"http://127.0.0.1:{self.server_port}"
        return [
            {"id": one, "tags": [{"tagName": tag}], "originalImageUri": f"{url}/blobs/{one}"}
            for one, (tag, _) in sorted(self.photos.items())[skip : skip + take]
        ]


class _Answers(BaseHTTPRequestHandler):
    server: _Project

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        query = {name: int(values[0]) for name, values in parse_qs(asked.query).items()}
        if asked.path.startswith("/blobs/"):
            self._answer(
                200, self.server.photos[asked.path.removeprefix("/blobs/")][1].read_bytes()
            )
        elif asked.path.lower() != IMAGES or query["take"] > LARGEST_PAGE:
            self._answer(404, b"{}")
        elif self.headers["Training-Key"] != KEY:
            self._answer(401, b"{}")
        else:
            self._answer(200, json.dumps(self.server.page(**query)).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def custom_vision(photos: Sequence[tuple[str, Path]]) -> Iterator[dict[str, str]]:
    """Serve photos with a tag each, and give the environment that the guide's program reads."""
    server = _Project(("127.0.0.1", 0), _Answers)
    server.photos = {f"{number:04x}": one for number, one in enumerate(photos)}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield {
            "CUSTOM_VISION_ENDPOINT": f"http://127.0.0.1:{server.server_port}/",
            "CUSTOM_VISION_KEY": KEY,
            "CUSTOM_VISION_PROJECT": PROJECT,
        }
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
