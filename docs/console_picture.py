"""Take the picture of the page that the documents show, from a server that runs.

python -m docs.console_picture docs/console.png http://127.0.0.1:8000 photos/*.jpg

It needs Chromium. Use photos that may be published.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1100, 880
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
CLOSE_DETAILS = "for (const one of document.querySelectorAll('details[open]')) one.open = false"
SLOW_MS = 60_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("picture", type=Path, help="the PNG to write")
    parser.add_argument("url", help="address of the server")
    parser.add_argument("photos", type=Path, nargs="+", help="images to drop on the page")
    given = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not installed", file=sys.stderr)
        return 1
    take(given.picture, given.url, given.photos, chromium=chromium)
    return 0


def take(picture: Path, url: str, photos: list[Path], *, chromium: str) -> None:
    """Open the page, drop the photos on it, wait for the answers, and close what is folded out."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(url)
        page.get_by_text("served", exact=True).first.wait_for(timeout=SLOW_MS)
        page.set_input_files("input[type=file]", [str(photo) for photo in photos])
        page.get_by_text(f"{len(photos)} images in").wait_for(timeout=SLOW_MS)
        page.evaluate(CLOSE_DETAILS)
        page.screenshot(path=str(picture))
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
