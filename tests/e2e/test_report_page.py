"""The page of a report in a real Chromium, on versions that the real commands made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dne_serve.access.permission import new_token
from model_store.records.quality import Gate
from model_store.store.store import Store
from tests.e2e.browsing import NEEDS_CHROMIUM, playwright, watching
from tests.live_server import Live, live_server
from tests.tiny_versions import promote, publish_tiny
from tests.trained_store import TrainedStore

pytestmark = NEEDS_CHROMIUM
expect = playwright.expect
HOSTILE_NAME = "<img src=x onerror=alert(1)>"
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}
DESK: dict[str, Any] = {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"}
WITH_LONG_TEXT = """all => all.map((one) => {
  one.textContent = "888.88 MiB";
  return one.scrollWidth <= one.clientWidth && getComputedStyle(one).borderStyle === "none";
})"""
LOADED = (
    "() => [...document.querySelectorAll('.pictures img')].filter((i) => i.naturalWidth).length"
)


@pytest.fixture(scope="module")
def trained(trained_store: TrainedStore) -> Iterator[Live]:
    with live_server(trained_store.location) as live:
        live.wait_until_ready()
        yield live


@pytest.mark.parametrize("window", [PHONE, DESK], ids=["phone in dark", "desk in light"])
def test_a_report_shows_verdict_pictures_and_plots_and_fits_the_window(
    browser: playwright.Browser, trained: Live, trained_store: TrainedStore, window: dict[str, Any]
) -> None:
    told = trained.http.get(f"/versions/{trained_store.refused}/report.json").json()
    path = f"/versions/{trained_store.refused}/report"
    with watching(browser, trained.url, path=path, **window) as watched:
        page = watched.page
        expect(page.locator(".badge")).to_have_text("refused")
        reasons = page.get_by_role("list", name="Why the gate refused this version")
        expect(reasons.get_by_role("listitem")).to_have_text(told["reasons"])
        expect(page.locator(".pictures img")).to_have_count(len(told["pictures"]))
        page.wait_for_function(f"({LOADED})() === {len(told['pictures'])}")
        for name in ("Accuracy of each task", "Accuracy by", "Parameters by", "GFLOP an image by"):
            expect(page.get_by_role("img", name=name)).to_be_visible()
        expect(page.get_by_role("img", name="Confusion matrix")).to_be_visible()
        expect(page.get_by_role("img", name="Right answers over confidence")).to_be_visible()
        expect(page.get_by_role("img", name="Scores of these images")).to_be_visible()
        expect(page.get_by_text(told["run"]["command"])).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= window["viewport"]["width"]
        assert page.eval_on_selector_all(".tiles dt + dd", WITH_LONG_TEXT) == [True] * 7


def test_versions_without_a_report_of_their_own_say_so(
    browser: playwright.Browser, trained: Live, trained_store: TrainedStore
) -> None:
    with watching(browser, trained.url) as watched:
        page = watched.page
        page.get_by_role("link", name=f"Report of version {trained_store.retirement}").click()
        expect(page.get_by_text("Nothing was learnt in this version, and nothing")).to_be_visible()
        expect(page.locator(".pictures")).to_have_count(0)
        page.get_by_role("link", name=f"Version {trained_store.extension}", exact=True).click()
        expect(page.locator("#title")).to_have_text(f"Version {trained_store.extension}")
        page.goto(f"{trained.url}/versions/99/report")
        expect(page.get_by_role("alert")).to_contain_text("no version 99")


def test_a_server_with_tokens_is_asked_with_one(
    browser: playwright.Browser, trained_store: TrainedStore, tmp_path: Path
) -> None:
    made = new_token("someone=read")
    (tmp_path / "tokens").write_text(made.line)
    path = f"/versions/{trained_store.refused}/report"
    with (
        live_server(trained_store.location, token_file=tmp_path / "tokens") as guarded,
        watching(browser, guarded.url, path=path) as watched,
    ):
        page = watched.page
        for secret in ("wrong", made.secret):
            page.get_by_label("This report needs a token").fill(secret)
            page.get_by_role("button", name="Use it").click()
            if secret == "wrong":
                expect(page.locator("#door-error")).to_contain_text("not known here")
        expect(page.locator(".badge")).to_have_text("refused")
        expect(page.locator("#door")).to_be_hidden()
        page.wait_for_function(f"({LOADED})() > 0")
        page.reload()  # the token is kept for the tab
        expect(page.locator(".badge")).to_have_text("refused")


def test_names_are_text_and_a_version_without_figures_has_a_page(
    browser: playwright.Browser, tmp_path: Path
) -> None:
    store = Store.create(str(tmp_path / "models"))
    gate = Gate(passed=False, reasons=(HOSTILE_NAME,), notes=(HOSTILE_NAME,))
    tasks = [(HOSTILE_NAME, [HOSTILE_NAME + "1", "b"])]
    promote(store, publish_tiny(store, tasks=tasks, accuracy=0.5, gate=gate))
    bare = publish_tiny(store, tasks=[("bare", ["c"])], parent=store.manifest(1), seed=1)
    with live_server(tmp_path / "models") as live:
        with watching(browser, live.url, path="/versions/1/report") as watched:
            expect(watched.page.locator(".badge")).to_have_text("refused")
            expect(watched.page.get_by_text(f"{HOSTILE_NAME}1", exact=True).first).to_be_visible()
            assert watched.page.locator("main img").count() == 0
        with watching(browser, live.url, path=f"/versions/{bare.version}/report") as watched:
            expect(watched.page.locator(".badge")).to_have_text("not judged")
            expect(watched.page.get_by_text("accuracy then")).to_be_visible()
