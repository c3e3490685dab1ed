"""The page at `/` on a store that the real commands made."""

from __future__ import annotations

import re

from tests.e2e.browsing import NEEDS_CHROMIUM, drop, playwright, watching
from tests.live_server import live_server
from tests.trained_store import EXTENDED, NEW_NAME, RENAMED, RETIRED, TrainedStore

pytestmark = NEEDS_CHROMIUM
expect = playwright.expect


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
    with live_server(trained_store.location) as live:
        live.wait_until_ready()
        with watching(browser, live.url) as watched:
            page = watched.page
            rows = page.locator("#versions .version")
            expect(rows).to_have_count(len(trained_store.versions))
            for number, change in changes.items():
                expect(page.locator(f'[data-version="{number}"] .change')).to_have_text(change)
            refused = page.locator(f'[data-version="{trained_store.refused}"]')
            expect(refused.locator(".badge")).to_have_text("refused")
            expect(refused.locator(".reasons")).to_contain_text("--min-new")
            expect(page.locator(".badge.refused")).to_have_count(1)
            expect(refused.get_by_role("button")).to_have_accessible_name(
                re.compile("although refused$")
            )
            drop(page, *((f"{name}.png", trained_store.image(name)) for name in ("a", "0", "plus")))
            expect(page.locator("#answers .answer .about")).to_have_count(3)
