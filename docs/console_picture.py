"""Take the picture of the page that the documents show, from a server that runs.

python -m docs.console_picture docs/console.png http://127.0.0.1:8000 photos/*.jpg

It needs Chromium. Use photos that may be published.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.chromium import chromium

WIDTH, HEIGHT = 1100, 880
CLOSE_DETAILS = "for (const one of document.querySelectorAll('details[open]')) one.open = false"
SLOW_MS = 60_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("picture", type=Path, help="the PNG to write")
    parser.add_argument("url", help="address of the server")
    parser.add_argument("photos", type=Path, nargs="+", help="images to drop on the page")
    given = parser.parse_args()
    take(given.picture, given.url, given.photos)


def take(picture: Path, url: str, photos: list[Path]) -> None:
    """Open the page, drop the photos on it, wait for the answers, and close what is folded out."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(url)
        page.get_by_text("served", exact=True).first.wait_for(timeout=SLOW_MS)
        page.set_input_files("input[type=file]", [str(photo) for photo in photos])
        page.get_by_text(f"{len(photos)} images in").wait_for(timeout=SLOW_MS)
        page.evaluate(CLOSE_DETAILS)
        page.screenshot(path=str(picture))


if __name__ == "__main__":
    main()
