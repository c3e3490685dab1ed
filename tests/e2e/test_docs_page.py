"""The documentation at `/docs` in a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from model_store.store.store import Store
from tests.e2e.browsing import NEEDS_CHROMIUM, Watched, playwright, watching
from tests.live_server import Live, live_server, png
from tests.tiny_versions import promote, publish_tiny

pytestmark = NEEDS_CHROMIUM
expect = playwright.expect


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("docs")
    store = Store.create(str(folder / "models"))
    promote(store, publish_tiny(store))
    with live_server(folder / "models") as live:
        live.wait_until_ready()
        yield live


@pytest.fixture
def watched(browser: playwright.Browser, live: Live) -> Iterator[Watched]:
    with watching(browser, live.url, path="/docs") as watched:
        yield watched


def opened(page: playwright.Page, operation: str) -> playwright.Locator:
    box = page.locator(f"#{operation}")
    box.locator("> summary").click()
    return box


def test_every_operation_is_shown_and_can_be_found(watched: Watched, live: Live) -> None:
    paths = live.http.get("/openapi.json").json()["paths"]
    count = sum(map(len, paths.values()))
    assert count > 40
    boxes = watched.page.locator(".operation")
    expect(boxes).to_have_count(count)
    watched.page.get_by_label("Find a route").fill("post /rollback")
    expect(watched.page.locator(".operation:visible")).to_have_count(1)


def test_an_operation_can_be_opened_by_its_address(browser: playwright.Browser, live: Live) -> None:
    with watching(browser, live.url, path="/docs#promote_promote_post") as watched:
        box = watched.page.locator("#promote_promote_post")
        expect(box).to_contain_text("Needs a token with the scope admin")
        expect(box.locator(".command")).to_contain_text('"Authorization: Bearer $DNE_TOKEN"')
        expect(box.locator("form")).to_have_count(0)


def test_schemas_open_level_by_level(watched: Watched) -> None:
    box = opened(watched.page, "predict_predict_post")
    answer = box.locator(".answered").first.locator(".tree").first
    answer.locator("> summary").click()
    predictions = answer.locator(".tree", has_text="predictions").first
    expect(predictions).to_contain_text("list of Prediction")
    predictions.locator("> summary").click()
    expect(predictions).to_contain_text("list of Score")


def test_a_route_can_be_tried(watched: Watched) -> None:
    box = opened(watched.page, "show_version_versions__version__get")
    box.get_by_role("button", name="Send").click()
    expect(box.get_by_role("status")).to_have_text("Give version first.")
    box.get_by_label("version").fill("1")
    expect(box.locator(".command")).to_contain_text("/versions/1'")
    box.get_by_role("button", name="Send").click()
    expect(box.get_by_role("status")).to_contain_text("200")
    expect(box.locator(".shown")).to_contain_text('"version": 1')


def test_images_can_be_sent_from_it(watched: Watched, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    box = opened(watched.page, "predict_predict_post")
    box.locator("input[type=file]").set_input_files(tmp_path / "a.png")
    box.get_by_label("top_k").fill("1")
    box.get_by_role("button", name="Send").click()
    expect(box.get_by_role("status")).to_contain_text("200")
    expect(box.locator(".shown")).to_contain_text('"filename": "a.png"')


def test_it_fits_a_phone(browser: playwright.Browser, live: Live) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark"}
    with watching(browser, live.url, path="/docs", **phone) as watched:
        opened(watched.page, "predict_predict_post")
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= 360
