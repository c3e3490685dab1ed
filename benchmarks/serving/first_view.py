"""Measure how soon the page shows its first view of a store with 300 versions, and its bytes.

    python -m benchmarks.serving.first_view --store demo/models [--rounds N] [--json]

The store is one that the trainer made; a copy of it is lengthened by versions like its newest. Each
round opens the page in Chromium with nothing cached. The page's own clock starts with the request
and is read in the first frame in which the newest versions are laid out.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from pathlib import Path
from statistics import median

from playwright.sync_api import Browser

from benchmarks.figures import Figure, at_most, print_figures
from benchmarks.serving.one_server import own_server
from dne_serve.http.pages import CONSOLE
from tests.chromium import chromium
from tests.many_versions import lengthen

VERSIONS = 300
SCRIPT = (CONSOLE / "versions.js").read_text()
SHOWN = re.findall(r"^const NEWEST = (\d+);", SCRIPT, re.MULTILINE)[0]
"""Versions of the first view, as the page has it; older ones follow on demand."""
WATCH = f"""const look = () => {{
  const rows = document.querySelectorAll("#versions .version");
  if (rows.length === {SHOWN} && rows[0].getBoundingClientRect().height > 0)
    window.firstViewMs = performance.now();
  else requestAnimationFrame(look);
}};
requestAnimationFrame(look);"""
"""The page's own clock, from the request on: a look from outside takes longer than the view."""
SETTLE_MS = 500
"""For requests that end later; live events never let the network idle."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the first view of 300 versions.")
    parser.add_argument("--store", type=Path, required=True, help="made by the trainer; is copied")
    parser.add_argument("--rounds", type=int, default=9, help="times that the page is opened")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        location = Path(folder) / "models"
        shutil.copytree(options.store, location)
        lengthen(location, count=VERSIONS)
        with own_server(location) as server, chromium() as browser:
            open_page(browser, server.url)  # Chromium and the server warm up
            views = [open_page(browser, server.url) for _ in range(options.rounds)]
    seconds = [view[0] for view in views]
    measured = {"seconds, shortest": min(seconds), "seconds, longest": max(seconds)}
    print_figures(figures_of(views), measured=measured, as_json=options.json)


def open_page(browser: Browser, url: str) -> tuple[float, int]:
    """Open the page with an empty cache; seconds until it shows versions, and bytes received."""
    context = browser.new_context()
    page = context.new_page()
    received: list[int] = []
    page.on(
        "requestfinished",
        lambda one: received.append(
            one.sizes()["responseBodySize"] + one.sizes()["responseHeadersSize"]
        ),
    )
    page.add_init_script(WATCH)
    page.goto(url)
    took_ms = page.wait_for_function("() => window.firstViewMs").json_value()
    page.wait_for_timeout(SETTLE_MS)
    context.close()
    return took_ms / 1000, sum(received)


def figures_of(views: list[tuple[float, int]]) -> list[Figure]:
    return [
        at_most("first view, seconds, median", median(view[0] for view in views), 0.5),
        at_most("first view, KB", max(view[1] for view in views) / 1000, 200),
    ]


if __name__ == "__main__":
    main()
