"""The page at `/label`, driven by keys, on a server that collects what it is asked."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.e2e.browsing import NEEDS_CHROMIUM, playwright, watching
from tests.live_server import TOKEN, Live, live_server, png, wait_for
from tests.trained_store import TrainedStore

pytestmark = NEEDS_CHROMIUM
WAITING = 12
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def live(trained_copy: TrainedStore) -> Iterator[Live]:
    with live_server(trained_copy.location, collect="sample=100%", admin_token=None) as live:
        live.wait_until_ready()
        live.predict(*(png(seed, size=24) for seed in range(WAITING))).raise_for_status()
        wait_for(lambda: counts(live)["unlabelled"] == WAITING)
        yield live


@pytest.fixture
def page(browser: playwright.Browser, live: Live) -> Iterator[playwright.Page]:
    with watching(browser, live.url, path="/label") as watched:
        watched.page.get_by_label("First", exact=True).select_option("newest")
        newest = live.http.get("/inbox").json()["items"][0]["id"]
        first = tiles(watched.page).first
        playwright.expect(first).to_have_attribute("data-id", newest)
        playwright.expect(first).to_have_attribute("tabindex", "0")
        playwright.expect(tiles(watched.page)).to_have_count(WAITING)
        first.focus()
        yield watched.page


def counts(live: Live) -> dict[str, int]:
    found: dict[str, int] = live.http.get("/inbox").json()["counts"]
    return found


def tiles(page: playwright.Page) -> playwright.Locator:
    return page.get_by_role("listbox", name="Images").get_by_role("option")


def labels(live: Live) -> list[str]:
    items = live.http.get("/inbox", params={"state": "labelled"}).json()["items"]
    return sorted(one["judgement"]["label"] for one in items)


def test_keys_label_discard_and_take_back(page: playwright.Page, live: Live) -> None:
    first = live.http.get("/inbox").json()["items"][0]
    page.keyboard.press("1")
    playwright.expect(tiles(page)).to_have_count(WAITING - 1)
    assert labels(live) == [first["top"][0]["label"]]
    page.keyboard.press("Delete")
    playwright.expect(tiles(page)).to_have_count(WAITING - 2)
    assert counts(live)["discarded"] == 1
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+z")
    playwright.expect(tiles(page)).to_have_count(WAITING)
    assert counts(live) == {"unlabelled": WAITING, "labelled": 0, "wrong": 0, "discarded": 0}
    playwright.expect(page.get_by_role("button", name="Undo")).to_be_disabled()


def test_a_range_gets_a_new_name_that_is_offered_from_then_on(
    page: playwright.Page, live: Live
) -> None:
    for _ in range(3):
        page.keyboard.press("Shift+ArrowRight")
    playwright.expect(page.get_by_role("heading", name="4 images")).to_be_visible()
    page.keyboard.type("zebra")
    playwright.expect(page.get_by_role("option", name="New class: zebra")).to_be_visible()
    page.keyboard.press("Enter")
    playwright.expect(tiles(page)).to_have_count(WAITING - 4)
    assert labels(live) == ["zebra"] * 4
    page.keyboard.type("ze")
    playwright.expect(page.get_by_role("option", name="zebra", exact=True)).to_be_visible()
    page.keyboard.press("Enter")
    playwright.expect(tiles(page)).to_have_count(WAITING - 5)
    assert labels(live) == ["zebra"] * 5


@pytest.mark.slow
def test_a_name_of_markup_is_text(page: playwright.Page, live: Live) -> None:
    page.get_by_label("Another class, or a new name").fill(HOSTILE)
    page.keyboard.press("Enter")
    # The name holds a slash in no place, so it is a valid name, and nothing else.
    playwright.expect(tiles(page)).to_have_count(WAITING - 1)
    assert labels(live) == [HOSTILE]
    page.get_by_label("Show").select_option("labelled")
    playwright.expect(tiles(page)).to_have_count(1)
    playwright.expect(tiles(page).first).to_contain_text(HOSTILE)


@pytest.mark.slow
def test_a_name_that_cannot_be_one_is_refused_in_words(page: playwright.Page, live: Live) -> None:
    page.get_by_label("Another class, or a new name").fill("a/b")
    page.keyboard.press("Enter")
    playwright.expect(
        page.get_by_role("alert").filter(has_text="cannot name a folder")
    ).to_be_visible()
    assert counts(live)["unlabelled"] == WAITING


def test_two_people_do_not_overwrite_each_other(page: playwright.Page, live: Live) -> None:
    first = live.http.get("/inbox").json()["items"][0]
    live.http.post(f"/inbox/{first['id']}/label", json={"label": "theirs"}).raise_for_status()
    page.keyboard.press("1")
    playwright.expect(page.get_by_role("alert").filter(has_text="theirs")).to_be_visible()
    assert labels(live) == ["theirs"]


@pytest.mark.slow
def test_an_image_that_is_gone_leaves_the_grid(page: playwright.Page, live: Live) -> None:
    first = live.http.get("/inbox").json()["items"][0]
    live.http.delete(f"/inbox/{first['id']}").raise_for_status()
    page.keyboard.press("1")
    playwright.expect(tiles(page)).to_have_count(WAITING - 1)
    playwright.expect(
        page.get_by_role("alert").filter(has_text=re.compile("inbox"))
    ).to_be_visible()


@pytest.mark.slow
def test_who_has_no_token_is_asked_for_one(
    browser: playwright.Browser, trained_copy: TrainedStore
) -> None:
    with live_server(trained_copy.location, collect="sample=100%") as live:
        live.wait_until_ready()
        with watching(browser, live.url, path="/label") as watched:
            page = watched.page
            page.get_by_label("The inbox needs a token").fill("wrong")
            page.get_by_role("button", name="Use it").click()
            playwright.expect(page.locator("#door-error")).to_be_visible()
            page.get_by_label("The inbox needs a token").fill(TOKEN)
            page.get_by_role("button", name="Use it").click()
            playwright.expect(page.get_by_text("No image was kept yet.")).to_be_visible()


def test_a_group_is_named_at_once_and_images_like_no_other_are_none(
    page: playwright.Page, live: Live
) -> None:
    found = live.http.get("/inbox/groups").json()
    items = [*(item for one in found["groups"] for item in one["items"]), *found["others"]]
    # Noise is like no other noise, so the group is made up.
    made_up = {**found, "groups": [{"items": items[:5]}], "others": items[5:]}
    page.route("**/inbox/groups*", lambda route: route.fulfill(json=made_up))
    page.get_by_label("First", exact=True).select_option("groups")
    playwright.expect(page.locator(".group-name")).to_have_count(2)
    page.locator(".tile[tabindex='0']").focus()
    page.keyboard.press("End")
    page.keyboard.press("Shift+Enter")
    playwright.expect(page.locator(".tile[aria-selected='true']")).to_have_count(0)
    playwright.expect(page.get_by_role("button", name="Select group")).to_be_hidden()
    page.keyboard.press("Home")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("noise")
    page.keyboard.press("Enter")
    playwright.expect(tiles(page)).to_have_count(WAITING - 5)
    assert labels(live) == ["noise"] * 5


def test_the_last_images_can_be_taken_back_with_a_click(page: playwright.Page, live: Live) -> None:
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    playwright.expect(page.get_by_text("Everything has a label.")).to_be_visible()
    playwright.expect(page.get_by_role("button", name="Discard")).to_be_hidden()
    page.get_by_role("button", name="Undo").click()
    playwright.expect(tiles(page)).to_have_count(WAITING)
    playwright.expect(page.get_by_role("button", name="Discard")).to_be_visible()
    assert counts(live)["unlabelled"] == WAITING


@pytest.mark.slow
def test_groups_that_take_long_are_shown_as_groups(page: playwright.Page) -> None:
    def answer_late(route: playwright.Route) -> None:
        time.sleep(7)  # the page looks for new images every 5 s
        route.continue_()

    page.route("**/inbox/groups*", answer_late)
    page.get_by_label("First", exact=True).select_option("groups")
    playwright.expect(page.locator(".group-name").first).to_be_visible(timeout=60_000)
    playwright.expect(tiles(page)).to_have_count(WAITING)


@pytest.mark.slow
def test_an_image_is_taken_out_of_a_selection_and_the_name_is_given_again(
    page: playwright.Page, live: Live
) -> None:
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Control+ArrowLeft")
    page.keyboard.press("Space")
    page.keyboard.type("noise")
    page.keyboard.press("Enter")
    playwright.expect(tiles(page)).to_have_count(WAITING - 2)
    playwright.expect(page.get_by_role("button", name="Again: noise")).to_be_visible()
    page.keyboard.press("Enter")
    playwright.expect(tiles(page)).to_have_count(WAITING - 3)
    assert labels(live) == ["noise"] * 3


@pytest.mark.slow
def test_page_keys_go_from_group_to_group(page: playwright.Page, live: Live) -> None:
    found = live.http.get("/inbox/groups").json()
    items = [*(item for one in found["groups"] for item in one["items"]), *found["others"]]
    # Noise is like no other noise, so the groups are made up.
    groups = [{"items": items[:5]}, {"items": items[5:9]}]
    made_up = {**found, "groups": groups, "others": items[9:]}
    page.route("**/inbox/groups*", lambda route: route.fulfill(json=made_up))
    page.get_by_label("First", exact=True).select_option("groups")
    playwright.expect(page.locator(".group-name")).to_have_count(3)
    firsts = [items[place]["id"] for place in (0, 5, 9)]
    focused = page.locator(".tile[tabindex='0']")
    focused.focus()
    page.keyboard.press("PageDown")
    playwright.expect(focused).to_have_attribute("data-id", firsts[1])
    page.keyboard.press("ArrowRight")
    page.keyboard.press("PageUp")
    playwright.expect(focused).to_have_attribute("data-id", firsts[1])
    page.keyboard.press("PageUp")
    playwright.expect(focused).to_have_attribute("data-id", firsts[0])
    page.keyboard.press("End")
    page.keyboard.press("PageUp")
    playwright.expect(focused).to_have_attribute("data-id", firsts[-1])
    page.keyboard.press("Home")
    playwright.expect(focused).to_have_attribute("data-id", firsts[0])


@pytest.mark.slow
def test_kept_images_of_the_class_that_is_thought_of_stand_beside(
    page: playwright.Page, live: Live
) -> None:
    beside = page.get_by_role("group", name="Kept images to compare with")
    first, second = live.http.get("/inbox").json()["items"][0]["top"][:2]

    def expect_images_of(label: str) -> None:
        playwright.expect(beside.locator("bdi")).to_have_text(label)
        shown = live.http.get("/classes/examples", params={"label": label}).json()["pictures"]
        playwright.expect(beside.locator("img")).to_have_count(len(shown))
        assert beside.locator("img").first.evaluate("one => one.decode().then(() => true)")

    expect_images_of(first["label"])
    page.locator("#likeliest button").nth(1).hover()
    expect_images_of(second["label"])
    page.mouse.move(0, 0)
    expect_images_of(first["label"])
    page.keyboard.type(second["label"])
    expect_images_of(second["label"])
    page.get_by_label("Another class, or a new name").fill(HOSTILE)
    playwright.expect(beside.locator("bdi")).to_have_text(HOSTILE)
    playwright.expect(beside).to_contain_text("A new class: no image of it is kept.")
    page.keyboard.press("Escape")
    expect_images_of(first["label"])
