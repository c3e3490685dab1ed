"""The advice on the page at `/label`: a few plain lines, with pictures that are in the inbox."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from dne_serve.access.permission import new_token
from model_store.loop.corrections import list_corrections
from model_store.loop.inbox import Inbox
from model_store.report.advice import (
    Advice,
    AdvisedImage,
    ClassAdvice,
    Confused,
    Suspect,
    write_advice,
)
from model_store.store.shard import read_kept
from model_store.store.store import Store
from tests.e2e.browsing import NEEDS_CHROMIUM, playwright, watching
from tests.e2e.test_teach_page import COLOURS, picture
from tests.live_server import TOKEN, live_server
from tests.model_store.loop.items import add_item
from tests.trained_store import TrainedStore
from tests.trainer.folders import Listening, asked
from trainer.add_task import add_task
from trainer.request import NetworkShape, PretrainedFile

pytestmark = NEEDS_CHROMIUM
HOSTILE = "<img src=x onerror=alert(1)>"


def test_a_person_reads_what_would_help_and_sees_the_pictures(
    browser: playwright.Browser, trained_copy: TrainedStore
) -> None:
    store = Store.open(str(trained_copy.location))
    item = add_item(Inbox(store.objects), "1", minutes=1)
    picture = AdvisedImage(name=item, item=item)
    suspect = AdvisedImage(name=HOSTILE)
    advice = Advice(
        classes=(ClassAdvice(class_name="mug", images=30, accuracy=0.8, more=15, gain=0.04),),
        confused=(Confused(class_name=HOSTILE, taken_for="cup", count=2, images=(picture,)),),
        suspects=(Suspect(image=suspect, class_name="mug", likelier="cup", score=0.1),),
        suspects_in_all=1,
    )
    write_advice(store, store.manifest(trained_copy.served), advice)
    with (
        live_server(Path(store.location)) as live,
        watching(browser, live.url, path="/label") as watched,
    ):
        live.wait_until_ready()
        page = watched.page
        page.get_by_label("The inbox needs a token").fill(TOKEN)
        page.get_by_role("button", name="Use it").click()
        told = page.get_by_role("list", name="What would help most").get_by_role("listitem")
        playwright.expect(told).to_have_text(
            [
                "1 image looks more like another class than like its own. Look first at "
                f"{HOSTILE}: it is labelled mug and looks like cup.",
                "About 15 more images of mug: + 4 points.",
                f"{HOSTILE} is confused with cup (2 images): look at 1 image of the inbox.",
            ]
        )
        playwright.expect(told.nth(2).get_by_role("img", name=item)).to_be_visible()
        assert page.locator("#advice img").count() == 1


def test_a_report_corrects_what_the_channel_names_and_nothing_older(
    browser: playwright.Browser, trained_copy: TrainedStore
) -> None:
    store = Store.open(str(trained_copy.location))
    shown = next(one for one in store.versions() if store.manifest(one).metrics.shown)
    store.promote(shown, channel="production", actor="tests", reason="")
    with (
        live_server(Path(store.location)) as live,
        watching(browser, live.url, path=f"/versions/{shown}/report#token={TOKEN}") as watched,
    ):
        live.wait_until_ready()
        page = watched.page
        page.reload()
        tile = page.locator(".pictures figure").first
        tile.get_by_text("Wrong label?").click()
        tile.get_by_role("button", name="Take it out").click()
        playwright.expect(tile).to_contain_text("Will be taken out.")
        playwright.expect(page.get_by_role("heading", name="What would help most")).to_be_visible()
        (said,) = list_corrections(store)
        wrong = store.manifest(shown).metrics.shown[0]
        (entry,) = [one for one in store.manifest(shown).held_out if one.class_name == said.label]
        kept = read_kept(store.read_stored_shard, entry)
        assert (said.label, said.to) == (wrong.class_name, None)
        assert said.image == hashlib.sha256(kept[wrong.image]).hexdigest()
        tile.get_by_role("button", name="Undo").click()
        playwright.expect(tile).to_contain_text("Taken back.")
        another = next(one for one in store.versions() if one != shown)
        store.promote(another, channel="production", actor="tests", reason="")
        page.reload()
        playwright.expect(page.locator(".pictures img").first).to_be_visible()
        page.wait_for_load_state("networkidle")
        playwright.expect(page.get_by_text("Wrong label?")).to_have_count(0)


def test_the_report_of_a_reader_who_may_not_label_corrects_nothing(
    browser: playwright.Browser, trained_copy: TrainedStore, tmp_path: Path
) -> None:
    store = Store.open(str(trained_copy.location))
    shown = next(one for one in store.versions() if store.manifest(one).metrics.shown)
    store.promote(shown, channel="production", actor="tests", reason="")
    made = new_token("reader=read")
    (tmp_path / "tokens").write_text(made.line)
    with (
        live_server(Path(store.location), token_file=tmp_path / "tokens") as live,
        watching(
            browser, live.url, path=f"/versions/{shown}/report#token={made.secret}"
        ) as watched,
    ):
        page = watched.page
        page.reload()
        playwright.expect(page.locator(".pictures img").first).to_be_visible()
        page.wait_for_load_state("networkidle")
        playwright.expect(page.get_by_text("Wrong label?")).to_have_count(0)
        assert "What would help most" not in page.inner_text("main")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_wrong_label_is_seen_and_corrected_and_learnt(
    browser: playwright.Browser, trained_copy: TrainedStore, tmp_path: Path
) -> None:
    """From the advice of the real trainer to a version without the error, by clicks."""
    folder, store = tmp_path / "wrong", tmp_path / "models"
    for colour in COLOURS:
        (folder / colour).mkdir(parents=True)
        for seed in range(16):
            (folder / colour / f"{seed:02}.png").write_bytes(picture(colour, seed))
    for seed in range(90, 92):
        (folder / "red" / f"{seed:02}.png").write_bytes(picture("blue", seed))
    request = asked(
        store,
        folder,
        memory=300,
        shape=NetworkShape(),
        pretrained=PretrainedFile(file=trained_copy.folder / "vit.safetensors", normalise="half"),
    )
    add_task(request, progress=Listening())
    with live_server(store, with_trainer=True) as live:
        live.wait_until_ready()
        with watching(browser, live.url, path=f"/label#token={TOKEN}") as watched:
            page = watched.page
            cards = page.get_by_role("list", name="Images to look at").locator(":scope > li")
            wrong = cards.filter(has_text="labelled red · looks like blue")
            playwright.expect(wrong).to_have_count(2)
            playwright.expect(wrong.first.get_by_role("img")).to_be_visible()
            wrong.first.get_by_role("button", name="It is blue").click()
            playwright.expect(wrong.first).to_contain_text("Will be blue.")
            wrong.nth(1).get_by_role("button", name="Take it out").click()
            playwright.expect(wrong.nth(1)).to_contain_text("Will be taken out.")
            playwright.expect(page.get_by_text("2 corrections wait")).to_be_visible()
            page.get_by_role("button", name="Learn…").click()
            page.get_by_role("dialog").get_by_role("button", name="Learn").click()
            verdict = page.get_by_role("group", name="Verdict")
            playwright.expect(verdict).to_contain_text("Version 2 was promoted", timeout=240_000)
            playwright.expect(verdict).to_contain_text("2 images corrected of")
            playwright.expect(page.get_by_text("No label waits for learning.")).to_be_visible()
    manifest = Store.open(str(store)).manifest(2)
    assert manifest.corrected == 2
    assert manifest.tasks == Store.open(str(store)).manifest(1).tasks
