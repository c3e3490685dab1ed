"""The Learn part of the page at `/label`: labels that wait, progress, verdict, the way back."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from model_store.loop.claim import JobClaim
from model_store.loop.inbox import Inbox, Judgement
from model_store.loop.jobs import Jobs
from model_store.records.jobs import MadeVersion
from model_store.store.store import Store
from tests.e2e.browsing import NEEDS_CHROMIUM, playwright, watching
from tests.live_server import TOKEN, Live, live_server, wait_for
from tests.model_store.loop.items import add_item
from tests.trained_store import SIZE, TrainedStore

pytestmark = NEEDS_CHROMIUM
HOSTILE = "<img src=x onerror=alert(1)>"
NEW = 24
MINUTES = 4 * 60_000.0
"""For a real worker on a busy machine, in milliseconds."""


@pytest.fixture
def store(trained_copy: TrainedStore) -> Store:
    return Store.open(str(trained_copy.location))


@pytest.fixture
def live(store: Store) -> Iterator[Live]:
    inbox = Inbox(store.objects)
    for number, name in enumerate([HOSTILE] * 3 + ["a"] * 2 + ["rare"]):
        item = add_item(inbox, str(number), minutes=number / 60)
        inbox.judge(item, Judgement.of_class(name), actor="tests")
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        yield live


@pytest.fixture
def page(browser: playwright.Browser, live: Live) -> Iterator[playwright.Page]:
    with watching(browser, live.url, path="/label") as watched:
        watched.page.get_by_label("The inbox needs a token").fill(TOKEN)
        watched.page.get_by_role("button", name="Use it").click()
        playwright.expect(watched.page.get_by_text("5 labels wait for learning")).to_be_visible()
        yield watched.page


def learn(page: playwright.Page) -> None:
    page.get_by_role("button", name="Learn…").click()
    page.get_by_label("Reason").fill("enough labels")
    page.get_by_role("dialog").get_by_role("button", name="Learn").click()


def claimed(store: Store) -> JobClaim:
    claim = Jobs(store.objects).claim_next(channel="production", worker="a worker")
    assert claim is not None
    return claim


def test_a_person_follows_a_job_to_a_refusal_and_promotes_anyway(
    page: playwright.Page, live: Live, store: Store, trained_copy: TrainedStore
) -> None:
    waiting = page.get_by_role("list", name="Labels that wait, by class")
    playwright.expect(waiting.get_by_role("listitem")).to_have_text([f"{HOSTILE}3", "a2"])
    playwright.expect(page.get_by_text("a new class needs at least 2 images")).to_be_visible()
    learn(page)
    playwright.expect(page.get_by_text("Waiting for a worker.")).to_be_visible()
    claim = claimed(store)
    claim.heartbeat("learning", share=0.4, seconds_left=11.2, log=[f"new: {HOSTILE}"])
    playwright.expect(page.get_by_text("learning: 40 %, about 12 s left")).to_be_visible()
    page.get_by_text("Log", exact=True).click()
    playwright.expect(page.get_by_text(f"new: {HOSTILE}")).to_be_visible()
    refused = MadeVersion(
        version=trained_copy.refused, promoted=False, refused="the gate refused it"
    )
    claim.end("refused", reason="the gate refused it", versions=[refused])
    verdict = page.get_by_role("group", name="Verdict")
    playwright.expect(verdict).to_contain_text(f"Version {refused.version} was not promoted")
    playwright.expect(verdict).to_contain_text("Refused: the gate refused it")
    playwright.expect(verdict).to_contain_text("likely")
    verdict.get_by_role("button", name="Promote anyway…").click()
    page.get_by_label("Why move to it all the same?").fill("I have looked")
    page.get_by_role("dialog").get_by_role("button", name="Promote although refused").click()
    live.wait_until_serving(refused.version)
    assert live.history()[-1].reason == "I have looked"


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1440, 900)])
def test_a_verdict_is_folded_and_a_rollback_after_it_is_told(
    browser: playwright.Browser,
    live: Live,
    store: Store,
    trained_copy: TrainedStore,
    width: int,
    height: int,
) -> None:
    add_item(Inbox(store.objects), "waits")
    Jobs(store.objects).ask(channel="production", kind="learn-from-inbox", actor="tests", reason="")
    promoted = MadeVersion(version=trained_copy.third, promoted=True, refused=None)
    claimed(store).end("promoted", reason="", versions=[promoted])
    headers = {"Authorization": f"Bearer {TOKEN}"}
    live.http.post("/promote", json={"to": promoted.version, "reason": "better"}, headers=headers)
    with watching(browser, live.url, path="/label") as watched:
        page = watched.page
        page.set_viewport_size({"width": width, "height": height})
        page.get_by_label("The inbox needs a token").fill(TOKEN)
        page.get_by_role("button", name="Use it").click()
        verdict = page.get_by_role("group", name="Verdict")
        said = f"Version {promoted.version} was promoted"
        playwright.expect(verdict.get_by_text(said, exact=True)).to_be_visible()
        playwright.expect(verdict.get_by_text("likely").first).to_be_hidden()
        tile = page.locator(".tile").first
        playwright.expect(tile).to_be_visible()
        box = tile.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] / 2 < height
        verdict.get_by_text(said).click()
        playwright.expect(verdict.get_by_text("likely").first).to_be_visible()
        live.http.post("/rollback", json={"to": trained_copy.first}, headers=headers)
        since = f"{said}; version {trained_copy.first} is served now"
        playwright.expect(verdict.get_by_text(since)).to_be_visible()
        pinned = f"The channel stays at version {trained_copy.first} after a rollback"
        playwright.expect(page.get_by_text(pinned)).to_be_visible()
        playwright.expect(verdict.get_by_text("likely").first).to_be_visible()
        live.http.post("/resume", json={"reason": "mended"}, headers=headers)
        playwright.expect(page.get_by_text(pinned)).to_be_hidden()


def test_a_job_is_cancelled_with_one_click(page: playwright.Page, store: Store) -> None:
    learn(page)
    page.locator("#learn-cancel").click()
    playwright.expect(page.get_by_text("Learning was cancelled.")).to_be_visible()
    playwright.expect(page.get_by_role("button", name="Learn…")).to_be_enabled()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_collect_group_label_learn_serve_and_roll_back(
    browser: playwright.Browser, trained_copy: TrainedStore
) -> None:
    """The whole loop, by keys and clicks, with a real worker beside the server."""
    with live_server(trained_copy.pretrained, collect="sample=100%", with_trainer=True) as live:
        live.wait_until_ready()
        before = live.http.get("/readyz").json()["version"]
        live.predict(*(_image(number) for number in range(NEW))).raise_for_status()
        wait_for(lambda: _waiting(live) > NEW // 2)
        with watching(browser, live.url, path="/label") as watched:
            page = watched.page
            page.get_by_label("The inbox needs a token").fill(TOKEN)
            page.get_by_role("button", name="Use it").click()
            page.locator(".tile[tabindex='0']").first.focus()
            page.keyboard.press("Control+a")
            page.keyboard.type("zebra")
            page.keyboard.press("Enter")
            wait_for(lambda: _waiting(live) == 0)
            learn(page)
            verdict = page.get_by_role("group", name="Verdict")
            playwright.expect(verdict).to_contain_text("was promoted", timeout=MINUTES)
            playwright.expect(verdict).to_contain_text("zebra")
            answer = live.predict(_image(99)).json()
            assert answer["version"] > before
            assert answer["predictions"][0]["label"] == "zebra"
            page.get_by_role("button", name=f"Roll back to version {before}").click()
            live.wait_until_serving(before)
            # The version that used the labels is not behind the head any more: they wait again.
            playwright.expect(page.get_by_text("labels wait for learning")).to_be_visible()


def _waiting(live: Live) -> int:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    counts: dict[str, int] = live.http.get("/inbox", headers=headers).json()["counts"]
    return counts["unlabelled"]


def _image(seed: int) -> bytes:
    """A picture in shades of red, unlike the others to a near-duplicate check."""
    grid = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    grid[..., 0], grid[..., 1:] = 255, grid[..., 1:] // 3
    written = io.BytesIO()
    Image.fromarray(grid).resize((4 * SIZE, 4 * SIZE)).save(written, "PNG")
    return written.getvalue()


def test_the_link_of_a_server_without_tokens_asks_for_none_anywhere(
    browser: playwright.Browser, store: Store
) -> None:
    """Label, learn, go back: no prompt, and nothing of the token in the address."""
    inbox = Inbox(store.objects)
    for number in range(2):
        inbox.judge(add_item(inbox, str(number)), Judgement.of_class("a"), actor="tests")
    newest = max(store.versions())
    with live_server(Path(store.location), admin_token=None) as live:
        live.wait_until_ready()
        secret = live.serving.authorizer.begin_session()
        with watching(browser, live.url, path=f"/label#token={secret}") as watched:
            page = watched.page
            playwright.expect(page.get_by_text("2 labels wait for learning")).to_be_visible()
            assert page.url == f"{live.url}/label"
            page.get_by_role("button", name="Learn…").click()
            playwright.expect(page.get_by_label("Admin token")).to_be_hidden()
            page.get_by_role("dialog").get_by_role("button", name="Learn").click()
            playwright.expect(page.get_by_text("Waiting for a worker.")).to_be_visible()
            page.goto(f"{live.url}/")
            page.get_by_role("button", name=re.compile("^Roll back to version")).first.click()
            page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
            playwright.expect(page.get_by_role("dialog")).to_be_hidden()
            head = store.head("production")
            assert head is not None
            assert head.target < newest
            assert head.actor == "http:this-machine@127.0.0.1"


def test_without_a_token_for_it_there_is_no_button_to_learn(
    browser: playwright.Browser, store: Store
) -> None:
    inbox = Inbox(store.objects)
    for number in range(2):
        inbox.judge(add_item(inbox, str(number)), Judgement.of_class("a"), actor="tests")
    with live_server(Path(store.location), admin_token=None) as live:
        live.wait_until_ready()
        with watching(browser, live.url, path="/label") as watched:
            told = watched.page.get_by_text(
                "Learning cannot be asked for from this page: this server"
            )
            playwright.expect(told).to_be_visible()
            playwright.expect(watched.page.get_by_role("button", name="Learn…")).to_be_hidden()
