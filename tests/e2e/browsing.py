"""A page in a real Chromium, watched: what it asks of whom, and what it complains of."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.chromium import CHROMIUM

if TYPE_CHECKING:
    from playwright.sync_api import (
        Browser,
        BrowserContext,
        ConsoleMessage,
        FloatRect,
        Locator,
        Page,
        Request,
        Response,
    )

playwright = pytest.importorskip("playwright.sync_api", reason="THE PAGES NOT TRIED: no Playwright")
playwright.expect.set_options(timeout=15_000)  # a busy machine is no defect of a page
NEEDS_CHROMIUM = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="THE PAGES WERE NOT TRIED: there is no chromium on this machine"
    ),
]
PAGES = frozenset({"document", "script", "stylesheet", "image"})

# A drop as the browser makes one: a DataTransfer with files, on the element under the pointer.
DROP = """(files) => {
  const data = new DataTransfer();
  for (const [name, encoded] of files) {
    const bytes = Uint8Array.from(atob(encoded), (c) => c.charCodeAt(0));
    data.items.add(new File([bytes], name, { type: "image/png" }));
  }
  document.getElementById("drop").dispatchEvent(
    new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


class Watched:
    """A page with what it asked other hosts for, which of its files came without a policy, and
    what it complained of."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(15_000)
        self.elsewhere: list[str] = []
        self.unguarded: list[str] = []
        self.complaints: list[str] = []
        self.predicted: list[int] = []
        self._here = urlsplit(url).netloc
        self.page.on("request", self._note)
        self.page.on("response", self._judge)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("console", self._hear)

    def _note(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("blob", "data") and parts.netloc != self._here:
            self.elsewhere.append(request.url)

    def _judge(self, response: Response) -> None:
        if response.request.resource_type in PAGES and response.url.startswith("http"):
            policy = response.headers.get("content-security-policy", "")
            sniffed = response.headers.get("x-content-type-options") != "nosniff"
            if "default-src 'self'" not in policy or "unsafe" in policy or sniffed:
                self.unguarded.append(response.url)
        if urlsplit(response.url).path == "/predict":
            self.predicted.append(response.status)

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)


@contextmanager
def watching(browser: Browser, url: str, *, path: str = "/", **options: Any) -> Iterator[Watched]:
    """Open a page, and find at the end that it kept to this server and its policy."""
    context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}, **options})
    watched = Watched(context, url)
    watched.page.goto(url + path)
    try:
        yield watched
    finally:
        context.close()
    assert watched.elsewhere == []
    assert watched.unguarded == []
    assert watched.complaints == []


def box_of(shown: Locator) -> FloatRect:
    """Measure an element that is on the page."""
    box = shown.bounding_box()
    assert box is not None
    return box


def drop(page: Page, *files: tuple[str, bytes]) -> None:
    page.evaluate(DROP, [[name, base64.b64encode(data).decode()] for name, data in files])


def drop_paths(page: Page, *paths: Path) -> None:
    """Drop files and folders of the disk on the page, as a person does with a mouse."""
    session = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": 300, "y": 300, "data": data})
