"""A server on this machine that speaks the Hugging Face Hub's interface for models.

It answers `GET /api/models/OWNER/NAME[/revision/COMMIT]`, and `HEAD` and `GET
/OWNER/NAME/resolve/COMMIT/FILE` with the headers of the Hub: large files by a redirect to another
path, as to a CDN, with their SHA-256 as `X-Linked-Etag`.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LARGE = (".safetensors", ".bin")
COMMIT = "c0ffee" * 6 + "cafe"


@dataclass(slots=True, kw_only=True)
class Repository:
    files: dict[str, bytes]
    commit: str = COMMIT
    licence: str | None = "apache-2.0"
    token: str | None = None
    """The token without which it is gated."""
    hidden: bool = False
    """Answers 401 without a token, as the Hub does for names that nobody has."""
    sent: dict[str, bytes] = field(default_factory=dict)
    """Other bytes that are sent for a file than those that its headers tell of."""
    cut: dict[str, int] = field(default_factory=dict)
    """Files whose connection ends after so many bytes, each time."""
    pause_s: float = 0.0
    """The time between two of twenty pieces of a file."""


@dataclass(slots=True, kw_only=True)
class FakeHub:
    url: str
    repositories: dict[str, Repository]
    mute: bool = False
    """Never answers."""
    portal: bool = False
    """Answers everything with a page, as the Wi-Fi of a hotel does."""
    asked: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def cdn(self) -> str:
        """Return the address of the same server by another name: clients follow redirects to the
        Hub's own name by themselves."""
        return self.url.replace("127.0.0.1", "localhost")

    def add(self, name: str, folder: Path) -> Repository:
        files = {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}
        self.repositories[name] = Repository(files=files)
        return self.repositories[name]

    def environment(self, home: Path) -> dict[str, str]:
        """Return the variables that lead a program here."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        if hub.mute:
            hub.released.wait(60)
            self.close_connection = True
            return
        if hub.portal:
            page = b"<!DOCTYPE html><title>Please sign in</title>"
            self._send(200, page, {"Content-Type": "text/html"})
            return
        for pattern, act in self._routes():
            if found := pattern.fullmatch(path):
                act(found)
                return
        self._send(404, b"{}", {})

    def _routes(self) -> list[tuple[re.Pattern[str], Callable[[re.Match[str]], None]]]:
        return [
            (re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?"), self._about),
            (re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)"), self._resolve),
            (re.compile(r"/cdn/([^/]+/[^/]+)/(.+)"), self._bytes),
        ]

    def _repository(self, name: str) -> Repository | None:
        """Find a repository, or answer why there is none to see."""
        known = self.hub.repositories.get(name)
        own = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if known is None or (known.hidden and not own):
            code = {"X-Error-Code": "RepoNotFound"}
            self._send(401 if not own else 404, b'{"error": "Repository not found"}', code)
            return None
        if known.token is not None and own != known.token and "/resolve/" in self.path:
            code = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
            self._send(403 if own else 401, b'{"error": "gated"}', code)
            return None
        return known

    def _about(self, found: re.Match[str]) -> None:
        known = self._repository(found[1])
        if known is None:
            return
        if found[2] not in (None, "main", known.commit):
            code = {"X-Error-Code": "RevisionNotFound"}
            self._send(404, b'{"error": "Invalid rev id"}', code)
            return
        card = {} if known.licence is None else {"license": known.licence}
        about = {
            "_id": "0",
            "id": found[1],
            "sha": known.commit,
            "siblings": [{"rfilename": name} for name in sorted(known.files)],
            "cardData": card,
            "tags": [],
            "gated": "auto" if known.token else False,
        }
        self._send(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

    def _resolve(self, found: re.Match[str]) -> None:
        known = self._repository(found[1])
        if known is None:
            return
        data, commit = known.files.get(found[3]), {"X-Repo-Commit": known.commit}
        if data is None:
            self._send(404, b"", {**commit, "X-Error-Code": "EntryNotFound"})
            return
        if not found[3].endswith(LARGE):
            digest = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            self._send(200, data, {**commit, "ETag": f'"{digest}"'})
            return
        headers = {
            "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Linked-Size": str(len(data)),
            "Location": f"{self.hub.cdn}/cdn/{found[1]}/{found[3]}",
        }
        self._send(302, b"", {**commit, **headers})

    def _bytes(self, found: re.Match[str]) -> None:
        known, name = self.hub.repositories[found[1]], found[2]
        data = known.sent.get(name, known.files[name])
        begin = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
        headers = {"ETag": '"cdn"', "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._send(206 if begin else 200, data[begin:], headers, known.cut.get(name), known.pause_s)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str],
        cut: int | None = None,
        pause_s: float = 0.0,
    ) -> None:
        with suppress(OSError):  # the client may have left
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                whole = body if cut is None else body[:cut]
                step = len(whole) if not pause_s else max(1, len(whole) // 20)
                for begin in range(0, len(whole), max(1, step)):
                    self.wfile.write(whole[begin : begin + step])
                    time.sleep(pause_s)
            self.close_connection = cut is not None

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = FakeHub(url=f"http://127.0.0.1:{server.server_port}", repositories={})
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
