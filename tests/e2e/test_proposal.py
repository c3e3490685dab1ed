"""The proposal to adapt a version, on the page and in the report, with a real trainer behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from model_store.loop.jobs import Jobs
from model_store.store.store import Store
from tests.e2e.browsing import NEEDS_CHROMIUM, playwright, watching
from tests.live_server import TOKEN, Live, live_server, wait_for
from tests.trained_store import Commands, TrainedStore

pytestmark = [*NEEDS_CHROMIUM, pytest.mark.timeout(600)]
expect = playwright.expect
SAYS = "adapting the first expert to these 2 classes takes about 1 min and usually gains"
MINUTES = 4 * 60_000.0
"""For a real worker on a busy machine, in milliseconds."""


@pytest.fixture(scope="module")
def store(trained_store: TrainedStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick version of classes that look alike: cross-validation finds much to win."""
    folder = tmp_path_factory.mktemp("alike")
    vit = str(trained_store.folder / "vit.safetensors")
    start = ("--pretrained", vit, "--normalise", "imagenet", "--grow", "quick")
    Commands(folder / "models").train(trained_store.data("wrong"), *start)
    return folder / "models"


@pytest.fixture
def live(store: Path) -> Iterator[Live]:
    with live_server(store) as live:
        live.wait_until_ready()
        yield live


def adapt(page: playwright.Page) -> None:
    page.get_by_role("button", name="Adapt version 1").click()
    page.get_by_label("Admin token").fill(TOKEN)
    page.get_by_label("Reason").fill("it is night")
    page.get_by_role("dialog").get_by_role("button", name="Adapt").click()
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_a_report_proposes_and_asks_a_worker(
    browser: playwright.Browser, live: Live, store: Path
) -> None:
    with watching(browser, live.url, path="/versions/1/report") as watched:
        page = watched.page
        expect(page.get_by_text(SAYS)).to_be_visible()
        adapt(page)
        jobs = Jobs(Store.open(str(store)).objects)
        (job,) = jobs.of_channel("production", limit=1)
        assert (job.record.kind, job.record.reason) == ("grow", "it is night")
        jobs.cancel(job.record.id, actor="tests")


def test_without_an_administrator_the_page_says_it_and_offers_no_button(
    browser: playwright.Browser, store: Path
) -> None:
    with live_server(store, admin_token=None) as live:
        live.wait_until_ready()
        for path in ("/", "/versions/1/report"):
            with watching(browser, live.url, path=path) as watched:
                expect(watched.page.get_by_text(SAYS)).to_be_visible()
                expect(watched.page.get_by_role("button", name="Adapt")).to_have_count(0)


@pytest.mark.long
def test_a_click_adapts_the_version_and_then_nothing_is_proposed(
    browser: playwright.Browser, store: Path
) -> None:
    with live_server(store, with_trainer=True) as live:
        live.wait_until_ready()
        with watching(browser, live.url) as watched:
            page = watched.page
            expect(page.get_by_text(SAYS)).to_be_visible()
            adapt(page)
            wait_for(lambda: len(Store.open(str(store)).versions()) == 2, seconds=MINUTES / 1000)
            page.reload()
            expect(page.get_by_role("heading", name="Version 2")).to_be_visible()
            expect(page.get_by_text(SAYS)).to_have_count(0)
            page.goto(f"{live.url}/label")
            verdict = page.get_by_role("group", name="Verdict")
            expect(verdict).to_contain_text("Adapted to all classes", timeout=MINUTES)
