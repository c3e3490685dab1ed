"""Make the moving picture of the loop: photos are doubted, named, learnt and answered.

python -m docs.loop_picture docs/loop.webp STORE photos/crab --ask other/*.jpg

A server with a trainer runs on a copy of the store, and a real browser does what a person does. It
needs Chromium. Use photos that may be published.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from PIL import Image

from tests.chromium import chromium
from tests.live_server import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTH, HEIGHT = 1000, 760
SHOWN_WIDTH = 800
SERVE = "import sys; from dne_serve.cli import main; sys.exit(main())"
SLOW_MS = 10 * 60_000
FOLD = (
    "for (const id of ['live', 'advice-box']) document.getElementById(id)?.removeAttribute('open')"
)
QUALITY = 70


class Film:
    """Frames, each with the milliseconds that it is shown."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._frames: list[tuple[Image.Image, int]] = []

    def take(self, shown_ms: int) -> None:
        frame = Image.open(io.BytesIO(self._page.screenshot())).convert("RGB")
        size = (SHOWN_WIDTH, frame.height * SHOWN_WIDTH // frame.width)
        self._frames.append((frame.resize(size, Image.Resampling.LANCZOS), shown_ms))

    def write(self, picture: Path) -> None:
        (first, _), *others = self._frames
        first.save(
            picture,
            save_all=True,
            append_images=[frame for frame, _ in others],
            duration=[shown_ms for _, shown_ms in self._frames],
            loop=0,
            quality=QUALITY,
            method=6,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("picture", type=Path, help="the animated WebP to write")
    parser.add_argument("store", type=Path, help="a store; a copy of it learns")
    parser.add_argument("photos", type=Path, help="a folder of photos of a class it does not know")
    parser.add_argument("--ask", type=Path, nargs="+", required=True, help="other photos of it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(given.store, Path(folder) / "models")
        with _serving(copy) as (url, link), chromium() as browser:
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.set_default_timeout(SLOW_MS)
            film = Film(page)
            page.goto(link)  # the token of the link counts on all pages
            play(page, film, url=url, photos=sorted(given.photos.iterdir()), ask=given.ask)
    film.write(given.picture)
    print(f"{given.picture}: {given.picture.stat().st_size / 1e6:.2f} MB")


def play(page: Page, film: Film, *, url: str, photos: list[Path], ask: list[Path]) -> None:
    """Ask about the photos, name those that are doubted, learn, and ask about other ones."""
    name = photos[0].parent.name
    page.goto(url)
    page.set_input_files("#files", [str(photo) for photo in photos])
    page.get_by_text(f"{len(photos)} images in").wait_for()
    page.evaluate(FOLD)
    film.take(2500)
    page.goto(f"{url}/label")
    page.locator(".tile img").first.wait_for()
    page.wait_for_timeout(1000)
    page.evaluate(FOLD)
    film.take(1800)
    page.locator(".tile[tabindex='0']").first.focus()
    page.keyboard.press("Control+a")
    film.take(1200)
    for letter in name:
        page.keyboard.press(letter)
        film.take(150)
    film.take(900)
    page.keyboard.press("Enter")
    page.get_by_text("Everything has a label.").wait_for()
    film.take(1500)
    page.get_by_role("button", name="Learn…").click()
    film.take(1200)
    page.get_by_role("dialog").get_by_role("button", name="Learn").click()
    page.locator("#learn-progress").wait_for()
    verdict = page.get_by_role("group", name="Verdict")
    before = ""
    while not verdict.is_visible():
        phase = page.locator("#learn-phase").inner_text().partition(":")[0]
        if phase != before:
            film.take(700)
        before = phase
        page.wait_for_timeout(300)
    verdict.locator("summary").first.click()
    page.evaluate(FOLD)
    film.take(2500)
    head = httpx.get(f"{url}/versions").json()["total"]
    wait_for(lambda: httpx.get(f"{url}/readyz").json()["version"] == head, seconds=120)
    page.goto(url)
    page.set_input_files("#files", [str(photo) for photo in ask])
    page.get_by_text(f"{len(ask)} images in").wait_for()
    page.evaluate(FOLD)
    page.wait_for_timeout(500)
    film.take(4000)


@contextmanager
def _serving(store: Path) -> Iterator[tuple[str, str]]:
    """Serve a store with a trainer. Yield the address, and the link that brings a token."""
    options = ["--store", str(store), "--collect", "unknown,score<0.6", "--with-trainer"]
    command = [sys.executable, "-c", SERVE, "--port", "0", "--json", *options]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DNE_ADMIN")}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=kept)
    try:
        assert server.stdout is not None
        said = json.loads(server.stdout.readline())
        url = said["url"]
        wait_for(lambda: httpx.get(f"{url}/readyz").status_code == 200, seconds=120)
        yield url, said["link"]
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
