"""The page at `/` on a store that the real commands made, by what a user sees of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browsing import NEEDS_CHROMIUM, playwright, watching
from tests.live_server import TOKEN, Live, live_server
from tests.trained_store import EXTENDED, NEW_NAME, RENAMED, RETIRED, TrainedStore

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module", params=["tiny", "pretrained"])
def trained(request: pytest.FixtureRequest, trained_store: TrainedStore) -> Iterator[Live]:
    tiny = request.param == "tiny"
    with live_server(trained_store.location if tiny else trained_store.pretrained) as live:
        live.wait_until_ready()
        yield live


@pytest.fixture
def page(browser: playwright.Browser, trained: Live) -> Iterator[playwright.Page]:
    """Complains of nothing, and asks no other host."""
    with watching(browser, trained.url) as watched:
        yield watched.page


def choose(page: playwright.Page, image: Path) -> playwright.Locator:
    """Gives the page an image; the answer to it."""
    page.locator("#files").set_input_files(image)
    return page.get_by_role("list", name="Predictions").get_by_role("listitem").first


def row(page: playwright.Page, version: int) -> playwright.Locator:
    heading = page.get_by_role("heading", name=f"Version {version}", exact=True)
    return page.get_by_role("listitem").filter(has=heading)


def test_every_version_is_listed_with_its_accuracy(page: playwright.Page, trained: Live) -> None:
    told = trained.http.get("/versions").json()
    playwright.expect(page.get_by_role("status")).to_contain_text(f"version {told['served']}")
    for one in told["versions"]:
        accuracy = f"{100 * one['accuracy']['all']:.1f}"
        playwright.expect(row(page, one["version"])).to_contain_text(accuracy)
    playwright.expect(row(page, told["served"])).to_contain_text("served")


def test_every_version_can_be_asked(
    page: playwright.Page, trained: Live, trained_store: TrainedStore
) -> None:
    images = sorted((trained_store.data("letters") / RENAMED).iterdir())
    versions = [one["version"] for one in trained.http.get("/versions").json()["versions"]]
    for version, image in zip(versions, images, strict=False):
        answer = trained.predict(image.read_bytes(), query=f"?version={version}").json()
        page.get_by_label("Answer with").select_option(str(version))
        shown = choose(page, image)
        playwright.expect(shown).to_contain_text(image.name)
        playwright.expect(shown).to_contain_text(f"version {version}")
        playwright.expect(shown).to_contain_text(answer["predictions"][0]["label"])


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


@pytest.mark.parametrize("width", [360, 1100])
def test_what_is_told_of_versions_fits_the_window(
    browser: playwright.Browser, trained: Live, width: int
) -> None:
    window: dict[str, Any] = {"viewport": {"width": width, "height": 800}}
    with watching(browser, trained.url, **window) as watched:
        playwright.expect(watched.page.locator("#versions .version").first).to_be_visible()
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
