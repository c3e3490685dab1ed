"""The page at `/` on a store that the real commands made, by what a user sees of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_console import Watched, browser, playwright, pytestmark  # noqa: F401
from tests.live_server import TOKEN, Live, live_server
from tests.trained_store import NEW_NAME, RENAMED, TrainedStore


@pytest.fixture(scope="module", params=["tiny", "pretrained"])
def trained(request: pytest.FixtureRequest, trained_store: TrainedStore) -> Iterator[Live]:
    tiny = request.param == "tiny"
    with live_server(trained_store.location if tiny else trained_store.pretrained) as live:
        live.wait_until_ready()
        yield live


@pytest.fixture
def page(browser: playwright.Browser, trained: Live) -> Iterator[playwright.Page]:  # noqa: F811
    """Complains of nothing, and asks no other host."""
    watched = Watched(browser, trained.url)
    watched.page.goto(trained.url)
    yield watched.page
    watched.context.close()
    assert watched.elsewhere == []
    assert watched.complaints == []


def choose(page: playwright.Page, image: Path) -> playwright.Locator:
    """Gives the page an image; the answer to it."""
    page.locator("input[type=file]").set_input_files(image)
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
    browser: playwright.Browser,  # noqa: F811
    trained_copy: TrainedStore,
) -> None:
    image = trained_copy.data("letters") / RENAMED / "000.png"
    with live_server(trained_copy.location) as live:
        live.wait_until_ready()
        watched = Watched(browser, live.url)
        page = watched.page
        page.goto(live.url)
        page.get_by_role("button", name=f"Roll back to version {trained_copy.second}").click()
        page.get_by_label("Admin token").fill(TOKEN)
        page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
        playwright.expect(row(page, trained_copy.second)).to_contain_text("served")
        playwright.expect(choose(page, image)).to_contain_text(f"version {trained_copy.second}")
        page.get_by_role("button", name="Resume").click()
        page.get_by_role("dialog").get_by_role("button", name="Resume").click()
        playwright.expect(row(page, trained_copy.served)).to_contain_text("served")
        playwright.expect(choose(page, image)).to_contain_text(NEW_NAME)
        watched.context.close()
        assert (watched.elsewhere, watched.complaints) == ([], [])
