"""The advice on the page at `/label`: a few plain lines, with pictures that are in the inbox."""

from __future__ import annotations

from pathlib import Path

from model_store.loop.inbox import Inbox
from model_store.report.advice import (
    Advice,
    AdvisedImage,
    ClassAdvice,
    Confused,
    Suspect,
    write_advice,
)
from model_store.store.store import Store
from tests.e2e.browsing import NEEDS_CHROMIUM, playwright, watching
from tests.live_server import TOKEN, live_server
from tests.model_store.loop.items import add_item
from tests.trained_store import TrainedStore

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
