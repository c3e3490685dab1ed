"""The list of versions at `/` as a tree, and with hundreds of versions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browsing import NEEDS_CHROMIUM, playwright, watching
from tests.live_server import live_server
from tests.many_versions import lengthen
from tests.trained_store import TrainedStore

pytestmark = NEEDS_CHROMIUM
expect = playwright.expect
FIRST_VIEW_BYTES = 200_000
TREE = """async ([rows, edge]) => {
  const { treeOf } = await import("/console/versions_tree.js");
  return treeOf(rows.map(([version, parent]) => ({ version, parent })), edge);
}"""


def lanes(page: playwright.Page, rows: list[tuple[int, int | None]], edge: int = 0) -> Any:
    return page.evaluate(TREE, [rows, edge])


def test_branches_have_rails_of_their_own_and_join_where_they_began(
    browser: playwright.Browser, trained_store: TrainedStore
) -> None:
    with live_server(trained_store.location) as live, watching(browser, live.url) as watched:
        page = watched.page
        tree = lanes(page, [(5, 3), (4, 2), (3, 2), (2, 1), (1, None)])
        assert [one["lane"] for one in tree] == [0, 1, 0, 0, 0]
        assert [one["joins"] for one in tree] == [[], [], [], [1], []]
        assert [one["through"] for one in tree] == [[], [0], [1], [], []]
        assert [one["down"] for one in tree] == [True, True, True, True, False]
        # Version 2 was deleted; what is below version 3 is not listed yet.
        gone = lanes(page, [(4, 2), (3, 1)], 3)
        assert [(one["down"], one["lane"]) for one in gone] == [(True, 0), (True, 1)]
        assert [one["down"] for one in lanes(page, [(4, 2), (3, None)])] == [False, False]

        rows = page.locator("#versions .version")
        expect(rows).to_have_count(len(trained_store.versions))
        expect(page.locator("#versions .rail .dot")).to_have_count(len(trained_store.versions))
        second = page.locator(f'[data-version="{trained_store.second}"]')
        expect(second.locator(".across")).to_have_count(1)  # the branch of the last version


def test_a_version_tells_intervals_sizes_and_who_promoted_it(
    browser: playwright.Browser, trained_store: TrainedStore
) -> None:
    with live_server(trained_store.location) as live, watching(browser, live.url) as watched:
        page = watched.page
        told = {one["version"]: one for one in live.http.get("/versions").json()["versions"]}
        extension = told[trained_store.extension]
        low, high = extension["likely"]["old"]
        row = page.locator(f'[data-version="{trained_store.extension}"]')
        expect(row).to_contain_text(f"{100 * low:.0f} to {100 * high:.0f}")
        expect(row).to_contain_text("in all")
        expect(row.locator(".moved")).to_contain_text("Promoted by")
        expect(row.locator(".moved")).to_contain_text("more images of a")
        pinned = page.locator(f'[data-version="{trained_store.second}"]')
        expect(pinned.locator(".moved")).to_contain_text("trying what was before")
        details = page.get_by_label(f"Details of version {trained_store.second}")
        expect(pinned.locator(".shares")).to_be_hidden()
        details.click()
        expect(pinned.locator(".shares")).to_be_visible()
        page.evaluate("document.dispatchEvent(new Event('moved'))")  # the list is asked for again
        page.wait_for_timeout(500)
        expect(pinned.locator(".shares")).to_be_visible()


def test_a_server_without_an_admin_token_has_no_buttons_and_says_why(
    browser: playwright.Browser, trained_store: TrainedStore
) -> None:
    with (
        live_server(trained_store.location, admin_token=None) as live,
        watching(browser, live.url) as watched,
    ):
        page = watched.page
        expect(page.locator("#versions .version").first).to_be_visible()
        expect(page.locator("#locked")).to_contain_text("no token with the scope 'admin'")
        assert page.locator("#versions button").count() == 0
        expect(page.locator("#resume")).to_be_hidden()


def test_the_first_view_of_300_versions_is_small(
    browser: playwright.Browser, trained_store: TrainedStore, tmp_path: Path
) -> None:
    shutil.copytree(trained_store.location, tmp_path / "models")
    lengthen(tmp_path / "models", count=300)
    with live_server(tmp_path / "models") as live:
        context = browser.new_context()
        page = context.new_page()
        sizes: list[int] = []
        page.on(
            "requestfinished",
            lambda one: sizes.append(sum(one.sizes()[k] for k in SIZES)),
        )
        page.goto(live.url)
        expect(page.locator("#versions .version")).to_have_count(40)
        expect(page.locator("#older")).to_contain_text("260 more")
        context.close()
    assert sum(sizes) <= FIRST_VIEW_BYTES, sizes
    print(f"the first view of 300 versions: {sum(sizes)} bytes in {len(sizes)} requests")


SIZES = ("responseBodySize", "responseHeadersSize")


@pytest.mark.parametrize("width", [390, 1440])
def test_the_tree_fits_the_window(
    browser: playwright.Browser, trained_store: TrainedStore, width: int
) -> None:
    window: dict[str, Any] = {"viewport": {"width": width, "height": 800}}
    with (
        live_server(trained_store.location) as live,
        watching(browser, live.url, **window) as watched,
    ):
        expect(watched.page.locator("#versions .version").first).to_be_visible()
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
