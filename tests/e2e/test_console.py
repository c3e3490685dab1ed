"""The page at `/` in a real Chromium."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dne_serve.tokens import new_token
from model_store.store import Store
from tests.live_server import TOKEN, Live, live_server, png
from tests.tiny_versions import promote, publish_tiny

playwright = pytest.importorskip("playwright.sync_api", reason="CONSOLE NOT TRIED: no Playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE_NAME = "<img src=x onerror=alert(1)>"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="THE CONSOLE WAS NOT TRIED: there is no chromium on this machine"
    ),
]

# A drop as the browser makes one: a DataTransfer with a file, on the element under the pointer.
DROP = """([name, encoded]) => {
  const bytes = Uint8Array.from(atob(encoded), (c) => c.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name, { type: "image/png" }));
  document.getElementById("drop").dispatchEvent(
    new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield browser
        browser.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    store = Store.create(str(tmp_path / "models"))
    first = promote(store, publish_tiny(store, tasks=[("letters", ["a", "b"])], accuracy=0.75))
    tasks = [("odd", [HOSTILE_NAME, "c"])]
    promote(store, publish_tiny(store, tasks=tasks, parent=first, seed=1, accuracy=0.5))
    with live_server(tmp_path / "models") as live:
        live.wait_until_ready()
        yield live


class Watched:
    """A page, with what it asked other hosts for and what it complained of."""

    def __init__(self, browser: playwright.Browser, url: str) -> None:
        self.context = browser.new_context(viewport={"width": 1100, "height": 800})
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.elsewhere: list[str] = []
        self.complaints: list[str] = []
        here = urlsplit(url).netloc
        self.page.on("request", lambda request: self._note(request.url, here))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("console", self._hear)

    def _note(self, url: str, here: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("blob", "data") and parts.netloc != here:
            self.elsewhere.append(url)

    def _hear(self, message: playwright.ConsoleMessage) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)


@pytest.fixture
def watched(browser: playwright.Browser, live: Live) -> Iterator[Watched]:
    watched = Watched(browser, live.url)
    watched.page.goto(live.url)
    yield watched
    watched.context.close()
    assert watched.elsewhere == []
    assert watched.complaints == []


def drop(page: playwright.Page, name: str, data: bytes) -> None:
    page.evaluate(DROP, [name, base64.b64encode(data).decode()])


def test_an_image_dropped_on_the_page_shows_its_class_and_the_version(
    watched: Watched, live: Live, tmp_path: Path
) -> None:
    image = png(1, size=32)
    [expected] = live.predict(image).json()["predictions"]
    drop(watched.page, "noise.png", image)
    answer = watched.page.locator("#answers .answer")
    playwright.expect(answer).to_have_count(1)
    playwright.expect(answer.locator(".label")).to_contain_text(expected["label"])
    playwright.expect(answer.locator(".about")).to_contain_text("version 2")
    playwright.expect(answer.locator(".about")).to_contain_text("noise.png")
    bars = answer.locator(".bar")
    playwright.expect(bars).to_have_count(4)
    widths = [bar.bounding_box()["width"] for bar in answer.locator(".fill").all()]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 0
    watched.page.screenshot(path=tmp_path / "console.png", full_page=True)
    assert (tmp_path / "console.png").stat().st_size > 10_000


def test_images_can_be_chosen_with_the_keyboard_and_asked_of_another_version(
    watched: Watched, tmp_path: Path
) -> None:
    page = watched.page
    for i in range(2):
        (tmp_path / f"{i}.png").write_bytes(png(i))
    page.get_by_label("Answer with").select_option("1")
    with page.expect_file_chooser() as chooser:
        page.locator("#files").focus()
        page.keyboard.press("Enter")
    chooser.value.set_files([tmp_path / "0.png", tmp_path / "1.png"])
    playwright.expect(page.locator("#answers .about").first).to_contain_text("version 1")
    names = page.locator("#answers .about").all_text_contents()
    assert ["0.png" in names[0], "1.png" in names[1]] == [True, True]


def test_what_is_not_an_image_gets_a_sentence(watched: Watched) -> None:
    drop(watched.page, "notes.txt", b"hello")
    alert = watched.page.locator("#predict-error")
    playwright.expect(alert).to_contain_text("'notes.txt'")
    drop(watched.page, "noise.png", png())
    playwright.expect(alert).to_be_hidden()


def test_versions_are_listed_newest_first_and_names_are_text(watched: Watched) -> None:
    rows = watched.page.locator("#versions .version")
    playwright.expect(rows).to_have_count(2)
    playwright.expect(rows.nth(0)).to_contain_text("Version 2")
    playwright.expect(rows.nth(0)).to_contain_text("served")
    playwright.expect(rows.nth(0)).to_contain_text("50.0")
    playwright.expect(rows.nth(0)).to_contain_text(HOSTILE_NAME)
    playwright.expect(rows.nth(1)).to_contain_text("75.0")
    assert watched.page.locator("#versions img").count() == 0


def test_the_roll_back_button_asks_for_the_token_once(watched: Watched, live: Live) -> None:
    page = watched.page
    page.get_by_role("button", name="Roll back to version 1").click()
    page.get_by_label("Reason").fill("too many odd ones")
    page.get_by_label("Admin token").fill("wrong")
    page.locator("#move-go").click()
    playwright.expect(page.locator("#move-error")).to_contain_text("not known here")
    page.get_by_label("Admin token").fill(TOKEN)
    page.locator("#move-go").click()
    playwright.expect(page.locator("#versions .served")).to_contain_text("Version 1")
    playwright.expect(page.locator("#state")).to_contain_text("Serving version 1")
    record = live.serving.open_store().head("production")
    assert record is not None
    assert (record.target, record.reason) == (1, "too many odd ones")

    page.get_by_role("button", name="Resume").click()
    playwright.expect(page.get_by_label("Admin token")).to_be_hidden()
    page.locator("#move-go").click()
    playwright.expect(page.locator("#versions .served")).to_contain_text("Version 2")
    playwright.expect(page.get_by_role("button", name="Resume")).to_be_hidden()


def test_a_server_that_asks_for_a_token_gets_it_from_the_page(
    browser: playwright.Browser, tmp_path: Path
) -> None:
    store = Store.create(str(tmp_path / "guarded"))
    promote(store, publish_tiny(store))
    made = new_token("someone=predict,read")
    with live_server(tmp_path / "guarded", tokens=made.line) as live:
        live.wait_until_ready()
        watched = Watched(browser, live.url)
        page = watched.page
        page.goto(live.url)
        page.get_by_label("This server asks for a token").fill(made.secret)
        page.get_by_role("button", name="Use it").click()
        playwright.expect(page.locator("#versions .served")).to_contain_text("Version 1")
        playwright.expect(page.locator("#door")).to_be_hidden()
        drop(page, "noise.png", png())
        playwright.expect(page.locator("#answers .answer")).to_have_count(1)
        watched.context.close()
        assert watched.complaints == []


def test_a_version_published_elsewhere_appears_by_itself(watched: Watched, live: Live) -> None:
    page = watched.page
    playwright.expect(page.locator("#versions .version")).to_have_count(2)
    store = live.serving.open_store()
    tasks = [("greek", ["alpha"])]
    promote(store, publish_tiny(store, tasks=tasks, parent=store.manifest(2), seed=3))
    playwright.expect(page.locator("#versions .served")).to_contain_text("Version 3")


def test_the_documentation_renders(watched: Watched, live: Live) -> None:
    watched.page.goto(f"{live.url}/docs")
    paths = live.http.get("/openapi.json").json()["paths"]
    operations = sum(map(len, paths.values()))
    assert operations > 10
    playwright.expect(watched.page.locator(".opblock")).to_have_count(operations)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser: playwright.Browser, live: Live, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page = context.new_page()
    page.goto(live.url)
    drop(page, "a-file-with-quite-a-long-name-" * 4 + ".png", png())
    playwright.expect(page.locator("#answers .answer")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    context.close()
