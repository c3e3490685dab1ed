"""The page at `/` of a server with many models, in a real Chromium."""

from __future__ import annotations

from pathlib import Path

from tests.dne_serve.test_models import ask, make_store
from tests.e2e.browsing import NEEDS_CHROMIUM, box_of, playwright, watching
from tests.live_server import live_server

pytestmark = NEEDS_CHROMIUM
expect = playwright.expect


def test_the_models_are_listed_searched_and_opened(
    browser: playwright.Browser, tmp_path: Path
) -> None:
    for name in ("acme", "acme-eu", "basalt", "broken"):
        make_store(tmp_path, name)
    for record in (tmp_path / "broken" / "versions").iterdir():
        record.write_bytes(b"{}")
    with live_server("unused", models=str(tmp_path)) as live:
        live.wait_until_ready()
        for name in ("acme", "broken"):
            ask(live, name)
        with watching(browser, live.url) as watched:
            page = watched.page
            expect(page.locator("#rows tr")).to_have_count(4)
            acme, broken = page.locator("#rows tr").first, page.locator("#rows tr").last
            expect(acme).to_contain_text("answers")
            expect(acme.locator("svg")).to_have_attribute("aria-label", "1 request")
            expect(broken.locator(".bad")).to_contain_text("this software reads format 1 only")
            table, section = box_of(page.locator("#models")), box_of(page.locator("section"))
            assert table["width"] <= section["width"]
            page.fill("#search", "ACME")
            expect(page.locator("#rows tr")).to_have_count(2)
            page.click("#model-acme")
            expect(page.locator("#state")).to_contain_text("Serving version 1")
            expect(page.locator("#title")).to_have_text("acme")
            page.click("#all-models")
            expect(page.locator("#rows tr")).to_have_count(4)
