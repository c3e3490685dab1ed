"""The page at `/` on a store that the real commands made, by what a user sees of it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.browsing import NEEDS_CHROMIUM, playwright, watching
from tests.live_server import TOKEN, live_server
from tests.trained_store import EXTENDED, NEW_NAME, RENAMED, RETIRED, TrainedStore

pytestmark = NEEDS_CHROMIUM


def choose(page: playwright.Page, image: Path) -> playwright.Locator:
    """Gives the page an image; the answer to it."""
    page.locator("#files").set_input_files(image)
    return page.get_by_role("list", name="Predictions").get_by_role("listitem").first


def row(page: playwright.Page, version: int) -> playwright.Locator:
    heading = page.get_by_role("heading", name=f"Version {version}", exact=True)
    return page.get_by_role("listitem").filter(has=heading)


def test_the_buttons_go_back_and_on_and_a_class_has_its_name_of_the_time(
    browser: playwright.Browser, trained_copy: TrainedStore
) -> None:
    image = trained_copy.data("letters") / RENAMED / "000.png"
    with live_server(trained_copy.location) as live:
        live.wait_until_ready()
        with watching(browser, live.url) as watched:
            page = watched.page
            page.get_by_role("button", name=f"Roll back to version {trained_copy.second}").click()
            page.get_by_label("Admin token").fill(TOKEN)
            page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
            playwright.expect(row(page, trained_copy.second)).to_contain_text("served")
            playwright.expect(choose(page, image)).to_contain_text(f"version {trained_copy.second}")
            page.get_by_role("button", name="Resume").click()
            page.get_by_role("dialog").get_by_role("button", name="Resume").click()
            playwright.expect(row(page, trained_copy.served)).to_contain_text("served")
            playwright.expect(choose(page, image)).to_contain_text(NEW_NAME)


def test_every_kind_of_version_says_what_it_did_and_what_the_gate_said(
    browser: playwright.Browser, trained_store: TrainedStore
) -> None:
    changes = {
        trained_store.first: "learnt letters: a, b",
        trained_store.third: "learnt signs: minus, plus",
        trained_store.refused: "learnt wrong: left, right",
        trained_store.renaming: f"renamed {RENAMED} to {NEW_NAME}",
        trained_store.extension: f"extended {EXTENDED} with more images",
        trained_store.retirement: f"retired {RETIRED}",
        trained_store.branch: "learnt greek: alpha, beta",
    }
    with live_server(trained_store.location) as live, watching(browser, live.url) as watched:
        page = watched.page
        for number, change in changes.items():
            playwright.expect(row(page, number)).to_contain_text(change)
        playwright.expect(page.get_by_text("refused", exact=True)).to_have_count(1)
        refused = row(page, trained_store.refused)
        playwright.expect(refused.get_by_role("list")).to_contain_text(
            "less than the 100.0 % asked for"
        )
        button = refused.get_by_role("button")
        playwright.expect(button).to_have_accessible_name(re.compile("although refused$"))
        branch = row(page, trained_store.branch)
        playwright.expect(branch).to_contain_text(f"built on version {trained_store.second}")
