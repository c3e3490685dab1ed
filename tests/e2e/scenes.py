"""The states of every page that a person meets, each brought about as a person would.

The test of accessibility and the screenshots go through the same list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.e2e.browsing import drop, playwright
from tests.live_server import TOKEN

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

expect = playwright.expect
MANY = 40
Image = tuple[str, bytes]
"""A file name, and the bytes of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Servers and images for the scenes. The first server has the admin token `TOKEN`, collects
    pictures, and has a version that the gate refused."""

    url: str
    empty_url: str
    """A server without a store."""
    locked_url: str
    """A server that asks for a token."""
    images: Sequence[Image]
    """At least `MANY`."""
    strange: Image
    """An image that the served version finds unknown."""
    served: int
    earlier: int
    refused: int


Act = Callable[["Page", Stage], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    name: str
    path: str
    act: Act
    server: str = "url"
    """The field of the stage that names the server."""
    is_whole: bool = True
    """Whether a screenshot has the whole page. A dialog is in the middle of the window."""

    def open(self, page: Page, stage: Stage) -> None:
        page.goto(getattr(stage, self.server) + self.path.format(stage=stage))
        self.act(page, stage)


SCENES: list[Scene] = []


def scene(path: str, *, server: str = "url", is_whole: bool = True) -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        name = act.__name__.replace("_", "-")
        SCENES.append(Scene(name=name, path=path, act=act, server=server, is_whole=is_whole))
        return act

    return add


def _answers(page: Page, count: int) -> None:
    expect(page.locator("#answers .answer")).to_have_count(count, timeout=120_000)
    expect(page.locator("#progress")).to_be_hidden()


def _served(page: Page, stage: Stage) -> None:
    expect(page.locator("#versions .served")).to_contain_text(f"Version {stage.served}")


@scene("/")
def start(page: Page, stage: Stage) -> None:
    _served(page, stage)


@scene("/", server="empty_url")
def first_start(page: Page, stage: Stage) -> None:
    expect(page.locator("#no-versions")).to_be_visible()


@scene("/", server="locked_url")
def token_asked_for(page: Page, stage: Stage) -> None:
    expect(page.locator("#door")).to_be_visible()
    page.get_by_label("This server asks for a token").fill("wrong")
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("#door-error")).to_be_visible()


@scene("/")
def one_image(page: Page, stage: Stage) -> None:
    drop(page, stage.images[0])
    _answers(page, 1)


@scene("/")
def unknown_image(page: Page, stage: Stage) -> None:
    drop(page, stage.strange, stage.images[0])
    _answers(page, 2)
    expect(page.locator("#answers .unknown").first).to_contain_text("Unknown")


@scene("/")
def bad_file_beside_good_ones(page: Page, stage: Stage) -> None:
    drop(page, stage.images[0], ("notes.txt", b"no image"), stage.images[1])
    _answers(page, 3)
    expect(page.locator("#answers .failed")).to_have_count(1)


@scene("/", is_whole=False)
def many_images_under_way(page: Page, stage: Stage) -> None:
    answered = []

    def hold(route: Route) -> None:
        answered.append(route)
        if len(answered) < 3:
            route.continue_()

    page.route("**/predict*", hold)
    drop(page, *stage.images[:MANY])
    expect(page.locator("#progress-text")).to_contain_text(f"16 of {MANY}", timeout=120_000)


@scene("/")
def many_images(page: Page, stage: Stage) -> None:
    drop(page, *stage.images[:MANY])
    _answers(page, MANY)


@scene("/")
def many_images_one_open(page: Page, stage: Stage) -> None:
    many_images(page, stage)
    page.locator("#answers .answer .detail > summary").nth(2).click()


@scene("/")
def side_by_side(page: Page, stage: Stage) -> None:
    _served(page, stage)
    page.get_by_label("and beside it").select_option(str(stage.earlier))
    drop(page, *stage.images[:6])
    _answers(page, 6)


@scene("/")
def server_busy(page: Page, stage: Stage) -> None:
    busy = {"detail": "more than 256 images are waiting; try again soon"}
    headers = {"Retry-After": "0"}
    page.route("**/predict*", lambda route: route.fulfill(status=503, headers=headers, json=busy))
    drop(page, *stage.images[:2])
    expect(page.locator("#predict-error")).to_contain_text("not answered")


@scene("/")
def server_gone(page: Page, stage: Stage) -> None:
    _served(page, stage)
    page.context.set_offline(True)
    expect(page.locator("#offline")).to_be_visible()


@scene("/")
def live(page: Page, stage: Stage) -> None:
    drop(page, *stage.images[:8])
    _answers(page, 8)
    if not page.locator("#live-tiles").is_visible():
        page.locator("#live summary").click()
    expect(page.locator("#live-classes .bar").first).to_be_visible()


@scene("/")
def versions_in_detail(page: Page, stage: Stage) -> None:
    _served(page, stage)
    page.eval_on_selector_all("#versions .more", "all => all.forEach((one) => (one.open = true))")
    page.locator("#history-box summary").click()


@scene("/", is_whole=False)
def promote_although_refused(page: Page, stage: Stage) -> None:
    name = re.compile(f"version {stage.refused} although refused$")
    page.get_by_role("button", name=name).click()
    expect(page.locator("#refusal-reasons li").first).to_be_visible()


@scene("/", is_whole=False)
def roll_back_with_a_wrong_token(page: Page, stage: Stage) -> None:
    page.get_by_role("button", name=f"Roll back to version {stage.earlier}").click()
    page.locator("#reason").fill("trying what was before")
    page.get_by_label("Admin token").fill("wrong")
    page.locator("#move-go").click()
    expect(page.locator("#move-error")).to_be_visible()


def _pictures(page: Page) -> None:
    """Wait for every picture: the page asks for one after the other."""
    page.wait_for_function(
        "() => [...document.querySelectorAll('[data-picture]')].every((one) => "
        "one.querySelector('img')?.naturalWidth)",
        timeout=120_000,
    )


@scene("/versions/{stage.served}/report")
def report(page: Page, stage: Stage) -> None:
    expect(page.locator("main svg").first).to_be_visible()
    _pictures(page)


@scene("/versions/{stage.refused}/report")
def report_of_a_refused_version(page: Page, stage: Stage) -> None:
    expect(page.locator(".badge")).to_have_text("refused")
    _pictures(page)


@scene("/label")
def label(page: Page, stage: Stage) -> None:
    page.get_by_label("The inbox needs a token").fill(TOKEN)
    page.get_by_role("button", name="Use it").click()
    tiles = page.get_by_role("listbox", name="Images").get_by_role("option")
    expect(tiles.first).to_be_visible()
    tiles.first.click()


@scene("/label", server="empty_url")
def label_without_images(page: Page, stage: Stage) -> None:
    page.wait_for_load_state("networkidle")


@scene("/docs")
def docs(page: Page, stage: Stage) -> None:
    page.locator("#predict summary, details summary").first.click()


@scene("/")
def why_an_image_is_answered_so(page: Page, stage: Stage) -> None:
    one_image(page, stage)
    page.get_by_text("Why?").click()
    expect(page.locator(".near li").first).to_be_visible()


@scene("/label#teach", server="empty_url")
def new_classes(page: Page, stage: Stage) -> None:
    page.get_by_label("The inbox needs a token").fill(TOKEN)
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_label("Begin with")).to_be_visible()
    drop(page, *stage.images[:2], ("broken.png", b"no image"))
    page.get_by_label("Their class").fill("cat")
    page.get_by_role("button", name="Add").click()
    expect(page.get_by_text("1 could not be used")).to_be_visible()
