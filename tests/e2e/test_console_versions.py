"""The page at `/` in a real Chromium: versions, and moving the channel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dne_serve.access.permission import new_token
from model_store.maintenance.edit_classes import Care, rename_class
from model_store.records.quality import Gate
from model_store.store.store import Store
from tests.e2e.browsing import NEEDS_CHROMIUM, Watched, drop, playwright, watching
from tests.live_server import TOKEN, Live, live_server, png
from tests.tiny_versions import promote, publish_tiny

pytestmark = NEEDS_CHROMIUM
expect = playwright.expect
HOSTILE_NAME = "<img src=x onerror=alert(1)>"
REASON = "accuracy on old classes fell from 97.0 % to 51.0 %"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 2 is promoted, version 3 was refused."""
    folder = tmp_path_factory.mktemp("versions") / "models"
    store = Store.create(str(folder))
    first = promote(store, publish_tiny(store, tasks=[("letters", ["a", "b"])], accuracy=0.75))
    tasks = [("odd", [HOSTILE_NAME, "c"])]
    second = promote(store, publish_tiny(store, tasks=tasks, parent=first, seed=1, accuracy=0.5))
    refusal = Gate(passed=False, reasons=(REASON, HOSTILE_NAME))
    publish_tiny(store, tasks=[("bad", ["e"])], parent=second, seed=2, gate=refusal)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with live_server(folder) as live:
        live.wait_until_ready()
        yield live


@pytest.fixture
def live(server: Live) -> Live:
    """Serves version 2 again, whatever the test before did."""
    if server.history()[-1].target != 2:
        server.admin("/promote", to=2).raise_for_status()
    return server


@pytest.fixture
def watched(browser: playwright.Browser, live: Live) -> Iterator[Watched]:
    with watching(browser, live.url) as watched:
        yield watched


def row(page: playwright.Page, version: int) -> playwright.Locator:
    return page.locator(f'#versions [data-version="{version}"]')


def test_versions_are_listed_newest_first_and_names_are_text(watched: Watched) -> None:
    rows = watched.page.locator("#versions .version")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("Version 2")
    expect(rows.nth(1)).to_contain_text("served")
    expect(rows.nth(1)).to_contain_text("50.0")
    expect(rows.nth(1)).to_contain_text(f"learnt odd: {HOSTILE_NAME}, c")
    expect(rows.nth(2)).to_contain_text("75.0")
    expect(rows.nth(0).locator(".badge")).to_have_text("refused")
    expect(rows.nth(0).locator(".reasons li")).to_have_text([REASON, HOSTILE_NAME])
    assert watched.page.locator("#versions img").count() == 0


def test_the_roll_back_button_asks_for_the_token_once(watched: Watched, live: Live) -> None:
    page = watched.page
    page.get_by_role("button", name="Roll back to version 1").click()
    page.get_by_label("Reason").fill("too many odd ones")
    page.get_by_label("Admin token").fill("wrong")
    page.locator("#move-go").click()
    expect(page.locator("#move-error")).to_contain_text("not known here")
    page.get_by_label("Admin token").fill(TOKEN)
    page.locator("#move-go").click()
    expect(page.locator("#versions .served")).to_contain_text("Version 1")
    expect(page.locator("#state")).to_contain_text("Serving version 1")
    record = live.serving.open_store().head("production")
    assert record is not None
    assert (record.target, record.reason) == (1, "too many odd ones")

    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_label("Admin token")).to_be_hidden()
    page.locator("#move-go").click()
    expect(page.locator("#versions .served")).to_contain_text("Version 2")
    expect(page.get_by_role("button", name="Resume")).to_be_hidden()


def test_a_refused_version_is_promoted_only_with_its_reasons_seen_and_one_given(
    watched: Watched, live: Live
) -> None:
    page = watched.page
    page.get_by_role("button", name="Promote version 3 although refused").click()
    expect(page.locator("#refusal-reasons li")).to_have_text([REASON, HOSTILE_NAME])
    go = page.get_by_role("button", name="Promote although refused", exact=True)
    page.get_by_label("Admin token").fill(TOKEN)
    for nothing in ("", "   "):
        page.locator("#reason").fill(nothing)
        go.click()
        assert not page.evaluate("document.getElementById('move-form').checkValidity()")
    assert live.http.get("/readyz").json()["version"] == 2
    page.locator("#reason").fill("the old images were mislabelled")
    go.click()
    expect(page.locator("#versions .served")).to_contain_text("Version 3")
    assert live.history()[-1].reason == "the old images were mislabelled"

    page.get_by_role("button", name="Roll back to version 2").click()
    expect(page.locator("#refusal")).to_be_hidden()
    assert page.locator("#reason").get_attribute("required") is None


def test_a_wrong_admin_token_leaves_the_token_for_reading_alone(
    browser: playwright.Browser, folder: Path, live: Live, tmp_path: Path
) -> None:
    made = new_token("someone=predict,read")
    (tmp_path / "tokens").write_text(made.line)
    with (
        live_server(folder, token_file=tmp_path / "tokens") as guarded,
        watching(browser, guarded.url) as watched,
    ):
        page = watched.page
        expect(page.locator("#locked")).to_contain_text("once a token with the scope read is given")
        page.get_by_label("This server asks for a token").fill("wrong")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#door-error")).to_contain_text("not known here")
        drop(page, ("noise.png", png()))
        page.get_by_label("This server asks for a token").fill(made.secret)
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#versions .served")).to_contain_text("Version 2")
        expect(page.locator("#answers .answer")).to_have_count(1)  # it waited for the token
        expect(page.locator("#door")).to_be_hidden()

        page.get_by_role("button", name="Roll back to version 1").click()
        page.locator("#move-go").click()  # the token that is known is tried first
        expect(page.locator("#move-error")).to_contain_text("does not have the scope 'admin'")
        page.get_by_label("Admin token").fill("wrong")
        page.locator("#move-go").click()
        expect(page.locator("#move-error")).to_contain_text("not known here")
        page.locator("#move-cancel").click()
        page.reload()
        expect(page.locator("#versions .served")).to_contain_text("Version 2")
        expect(page.locator("#door")).to_be_hidden()


def test_a_move_that_fails_says_why_and_keeps_the_admin_token(watched: Watched) -> None:
    page = watched.page
    why = "this server cannot load version 1, so channel production was not moved"
    page.route("**/rollback", lambda route: route.fulfill(status=503, json={"detail": why}))
    page.get_by_role("button", name="Roll back to version 1").click()
    page.get_by_label("Admin token").fill(TOKEN)
    page.locator("#move-go").click()
    expect(page.locator("#move-error")).to_have_text(why)
    page.locator("#move-cancel").click()
    page.unroute("**/rollback")
    page.get_by_role("button", name="Roll back to version 1").click()
    page.locator("#move-go").click()
    expect(row(page, 1)).to_contain_text("served")


@pytest.mark.parametrize("has_store", [False, True], ids=["no store", "an empty store"])
def test_without_a_version_the_page_says_how_to_begin_and_fills_by_itself(
    browser: playwright.Browser, tmp_path: Path, has_store: bool
) -> None:
    location = tmp_path / "later"
    if has_store:
        Store.create(str(location))
    with live_server(location) as live, watching(browser, live.url) as watched:
        page = watched.page
        expect(page.locator("#state")).to_contain_text("Not ready")
        expect(page.locator("#no-versions")).to_contain_text("dne-train add-task --data")
        store = Store.open(str(location)) if has_store else Store.create(str(location))
        promote(store, publish_tiny(store))
        expect(page.locator("#versions .served")).to_contain_text("Version 1")
        expect(page.locator("#no-versions")).to_be_hidden()


def test_older_versions_are_shown_when_asked_for(watched: Watched, live: Live) -> None:
    page, asked = watched.page, []
    overview = live.http.get("/versions").json()
    everything = {one["version"]: one for one in overview["versions"]}

    def paged(route: playwright.Route) -> None:
        """Answers as a server that shows two versions a page."""
        query = parse_qs(urlsplit(route.request.url).query)
        asked.append(query)
        before = int(query["before"][0]) if "before" in query else 4
        shown = [number for number in everything if number < before][-2:]
        older: dict[str, Any] = {"total": 3, "next_before": shown[0] if shown[0] > 1 else None}
        versions = [everything[number] for number in shown]
        route.fulfill(json={**overview, "versions": versions, **older})

    page.route(re.compile(r"/versions(\?.*)?$"), paged)
    page.reload()
    rows = page.locator("#versions .version")
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="Show older (1 more)").click()
    expect(rows).to_have_count(3)
    expect(page.locator("#older")).to_be_hidden()
    assert page.evaluate("document.activeElement.id") == "move-to-1"
    with page.expect_response(re.compile(r"/versions\?limit=")):
        page.evaluate("document.dispatchEvent(new Event('moved'))")  # the list is asked for again
    expect(rows).to_have_count(3)
    assert [query["before"] for query in asked if "before" in query] == [["2"]]


def test_a_served_version_of_an_older_page_has_a_card(watched: Watched, live: Live) -> None:
    page = watched.page
    overview = {**live.http.get("/versions").json(), "served": 1}

    def paged(route: playwright.Route) -> None:
        """Answers as a server that shows one version a page."""
        query = parse_qs(urlsplit(route.request.url).query)
        end = int(query["before"][0]) - 1 if "before" in query else 3
        older = {"total": 3, "next_before": end if end > 1 else None}
        route.fulfill(json={**overview, "versions": overview["versions"][end - 1 : end], **older})

    page.route(re.compile(r"/versions(\?.*)?$"), paged)
    page.reload()
    expect(page.locator("#versions .version")).to_have_count(2)
    expect(row(page, 1)).to_contain_text("served")
    page.get_by_role("button", name="Show older (1 more)").click()
    expect(page.locator("#versions .version")).to_have_count(3)
    expect(page.locator("#older")).to_be_hidden()


def test_what_is_wrong_with_the_channel_stays_in_sight(
    browser: playwright.Browser, live: Live
) -> None:
    ready = live.http.get("/readyz").json()
    ready |= {"fallback": True, "head": 3, "error": f"shard {'5a' * 32} is missing"}
    with watching(browser, live.url, viewport={"width": 360, "height": 740}) as watched:
        watched.page.route("**/readyz", lambda route: route.fulfill(json=ready))
        state = watched.page.locator("#state")
        expect(state).to_contain_text("is missing")
        expect(state).to_contain_text("Serving version 2")
        expect(state).to_contain_text("in place of version 3, which the channel names")
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_version_published_elsewhere_appears_with_what_it_did(
    watched: Watched, live: Live
) -> None:
    expect(row(watched.page, 2)).to_contain_text("served")
    care = Care(store=live.serving.open_store(), channel="production", actor="tests")
    renamed = rename_class("a", "alpha", care=care).manifest.version
    expect(row(watched.page, renamed)).to_contain_text("served")
    expect(row(watched.page, renamed)).to_contain_text("renamed a to alpha")
