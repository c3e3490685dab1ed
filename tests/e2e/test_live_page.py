"""The live view, two versions side by side and the banner, in a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dne_serve.access.permission import new_token
from model_store.store.store import Store
from tests.e2e.browsing import NEEDS_CHROMIUM, Watched, drop, playwright, watching
from tests.live_server import Live, live_server, png
from tests.tiny_versions import flip_last_bit, promote, publish_tiny

pytestmark = NEEDS_CHROMIUM
expect = playwright.expect
HOSTILE = "<img src=x onerror=alert(1)>"
IMAGES = 12


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Serves version 2. Version 1 is its parent, and version 3 cannot be loaded."""
    folder = tmp_path_factory.mktemp("live")
    store = Store.create(str(folder / "models"))
    first = promote(store, publish_tiny(store, tasks=[("letters", ["a", HOSTILE])]))
    promote(store, publish_tiny(store, tasks=[("odd", ["c", "d"])], parent=first, seed=1))
    flip_last_bit(store, publish_tiny(store, seed=2).classifier)
    with live_server(folder / "models", canary="shadow=1") as live:
        live.wait_until_ready()
        yield live


@pytest.fixture
def watched(browser: playwright.Browser, live: Live) -> Iterator[Watched]:
    with watching(browser, live.url) as watched:
        expect(watched.page.locator("#beside option")).to_have_count(4)
        yield watched


def figure(page: playwright.Page, name: str) -> playwright.Locator:
    return page.locator("#live .figure").filter(has=page.get_by_text(name, exact=True))


def images(count: int) -> list[tuple[str, bytes]]:
    return [(f"{index}.png", png(index)) for index in range(count)]


def labels(live: Live, version: int) -> list[str]:
    data = [image for _, image in images(IMAGES)]
    found = live.predict(*data, query=f"?version={version}").json()["predictions"]
    return [one["label"] for one in found]


def test_the_live_view_follows_the_server(watched: Watched, live: Live) -> None:
    page = watched.page
    expect(figure(page, "Last swap")).to_contain_text("version 2")
    assert live.predict(*(image for _, image in images(IMAGES))).status_code == 200
    expect(page.locator("#live-asked")).to_contain_text("version 2")
    told = live.http.get("/live").json()
    names = page.locator("#live-classes .name")
    expect(names).to_have_text([one["label"] for one in told["answers"]["classes"]])
    expect(figure(page, "p99")).to_contain_text("ms")
    expect(figure(page, "Queue")).to_contain_text("of 256")
    agreed = told["shadow"]["same"] / IMAGES
    expect(figure(page, "Shadow")).to_contain_text(f"{100 * agreed:.1f}")
    page.locator("#live summary").click()
    expect(page.locator("#live-tiles")).to_be_hidden()


def test_two_versions_answer_the_same_images_side_by_side(watched: Watched, live: Live) -> None:
    page = watched.page
    differ = [one != other for one, other in zip(labels(live, 2), labels(live, 1), strict=True)]
    assert 0 < sum(differ) < IMAGES
    page.get_by_label("and beside it").select_option("1")
    drop(page, *images(IMAGES))
    rows = page.locator("#answers .answer")
    expect(rows).to_have_count(IMAGES)
    for place, is_different in enumerate(differ):
        expect(rows.nth(place).locator(".badge")).to_have_text(
            "differs" if is_different else "same"
        )
        expect(rows.nth(place).locator(".about")).to_contain_text(["version 2", "version 1"])
    same = IMAGES - sum(differ)
    told = f"Versions 2 and 1 agree on {same} of {IMAGES} images"
    expect(page.locator("#beside-told")).to_contain_text(told)
    page.get_by_label("Show only images on which they differ").check()
    expect(page.locator("#answers .answer:visible")).to_have_count(sum(differ))


@pytest.mark.parametrize(
    ("version", "why"), [("2", "both are version 2"), ("3", "Version 3 was not asked")]
)
def test_a_version_that_cannot_be_compared_says_why_and_the_first_one_answers(
    watched: Watched, version: str, why: str
) -> None:
    page = watched.page
    page.get_by_label("and beside it").select_option(version)
    drop(page, *images(2))
    expect(page.locator("#answers .answer")).to_have_count(2)
    expect(page.locator("#answers .answer.compared")).to_have_count(0)
    expect(page.locator("#beside-told")).to_contain_text(why)


def test_one_banner_tells_that_the_server_is_gone_and_the_page_goes_on_by_itself(
    watched: Watched,
) -> None:
    page = watched.page
    page.context.set_offline(True)
    banner = page.get_by_role("alert").filter(has_text="cannot be reached")
    expect(banner).to_have_count(1)
    expect(page.locator("#state")).to_have_text("Not connected")
    expect(page.locator("#versions-error")).to_be_hidden()
    page.context.set_offline(False)
    expect(banner).to_have_count(0, timeout=40_000)
    expect(page.locator("#state")).to_contain_text("Serving version 2")
    expect(page.locator("#live-note")).to_be_hidden(timeout=40_000)


def test_the_live_view_works_with_a_token(
    browser: playwright.Browser, live: Live, tmp_path: Path
) -> None:
    made, file = new_token("page=read,predict"), tmp_path / "tokens"
    file.write_text(f"{made.line}\n")
    file.chmod(0o600)
    with live_server(live.serving.settings.store, token_file=file) as locked:
        locked.wait_until_ready()
        with watching(browser, locked.url) as watched:
            page = watched.page
            expect(page.locator("#live-note")).to_contain_text("a token with the scope read")
            page.get_by_label("This server asks for a token").fill(made.secret)
            page.get_by_role("button", name="Use it").click()
            expect(figure(page, "Last swap")).to_contain_text("version 2")
            expect(page.locator("#live-note")).to_be_hidden()


@pytest.mark.parametrize("width", [390, 1440])
def test_the_live_view_fits_the_window(browser: playwright.Browser, live: Live, width: int) -> None:
    """On a phone it is closed at first: predicting comes first."""
    window: dict[str, Any] = {"viewport": {"width": width, "height": 800}}
    with watching(browser, live.url, **window) as watched:
        page = watched.page
        if width < 1000:
            expect(page.locator("#live-tiles")).to_be_hidden()
            page.locator("#live summary").click()
        expect(page.locator("#live .figure").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_server_without_a_version_counts_no_failures(
    browser: playwright.Browser, tmp_path: Path
) -> None:
    """Each answer is 503 there, and the page says why elsewhere."""
    with live_server(tmp_path / "none") as live:
        assert live.predict(png()).status_code == 503
        with watching(browser, live.url) as watched:
            expect(watched.page.locator("#live-asked")).to_have_text("No version is served yet.")
            expect(figure(watched.page, "Queue")).to_be_visible()
            expect(figure(watched.page, "Failed")).to_have_count(0)
