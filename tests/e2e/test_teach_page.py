"""New classes on the page at `/label`: folders are dropped, learnt and served."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.e2e.browsing import NEEDS_CHROMIUM, drop_paths, playwright, watching
from tests.live_server import TOKEN, Live, live_server, png, wait_for
from tests.trained_store import SIZE, TrainedStore

pytestmark = NEEDS_CHROMIUM
MINUTES = 4 * 60_000.0
COLOURS = {"red": 0, "green": 1, "blue": 2}


def picture(colour: str, seed: int) -> bytes:
    """A picture in shades of one colour."""
    grid = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    grid //= 3
    grid[..., COLOURS[colour]] = 255
    written = io.BytesIO()
    Image.fromarray(grid).resize((4 * SIZE, 4 * SIZE)).save(written, "PNG")
    return written.getvalue()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three folders of 12 photos, and beside them what people have there too."""
    made = tmp_path_factory.mktemp("photos")
    for number, colour in enumerate(COLOURS):
        (made / colour).mkdir()
        for seed in range(12):
            (made / colour / f"{seed:02}.png").write_bytes(picture(colour, 100 * number + seed))
    (made / "red" / ".DS_Store").write_bytes(b"x")
    (made / "red" / "notes.txt").write_text("bought in May")
    (made / "green" / "broken.jpg").write_bytes(b"not an image")
    return made


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    """A server without a store, a trainer and a rule of collecting."""
    with live_server(tmp_path / "models", admin_token=None) as live:
        yield live


@pytest.fixture
def page(browser: playwright.Browser, live: Live) -> Iterator[playwright.Page]:
    with watching(browser, live.url, path="/label#teach") as watched:
        yield watched.page


def rows(page: playwright.Page) -> playwright.Locator:
    return page.get_by_role("list", name="Classes that were dropped here").locator(":scope > li")


def test_folders_become_classes_and_bad_files_are_named(
    page: playwright.Page, live: Live, folders: Path
) -> None:
    drop_paths(page, *(folders / colour for colour in COLOURS))
    playwright.expect(rows(page)).to_have_count(3)
    playwright.expect(rows(page).nth(0)).to_contain_text("red12 photos")
    playwright.expect(rows(page).nth(1)).to_contain_text("1 could not be used")
    playwright.expect(page.get_by_text("notes.txt")).to_be_visible()
    rows(page).nth(1).get_by_text("1 could not be used").click()
    playwright.expect(rows(page).nth(1)).to_contain_text("broken.jpg: ")
    playwright.expect(
        page.get_by_text("36 labels wait for learning · 3 new classes")
    ).to_be_visible()
    drop_paths(page, folders / "red")
    playwright.expect(rows(page).nth(0)).to_contain_text("12 photos · 12 of them here before")
    rows(page).nth(2).get_by_role("button", name="Take out blue").click()
    playwright.expect(rows(page)).to_have_count(2)
    playwright.expect(
        page.get_by_text("24 labels wait for learning · 2 new classes")
    ).to_be_visible()
    assert live.http.get("/inbox").json()["counts"]["discarded"] == 12


def test_a_zip_and_loose_photos_are_taken_too(
    page: playwright.Page, folders: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "animals.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as written:
        for number in range(3):
            written.write(folders / "red" / f"{number:02}.png", f"all/crimson/{number}.png")
            written.write(folders / "blue" / f"{number:02}.png", f"all/azure/{number}.png")
        written.writestr("__MACOSX/all/crimson/._0.png", b"x")
        written.writestr("all/crimson/huge.png", b"\0" * (33 << 20))
    page.get_by_label("Drop a folder of photos for each class here").set_input_files(archive)
    playwright.expect(rows(page)).to_have_count(2)
    playwright.expect(rows(page).nth(0)).to_contain_text("crimson3 photos")
    playwright.expect(rows(page).nth(0)).to_contain_text("1 could not be used")
    playwright.expect(rows(page).nth(1)).to_contain_text("azure3 photos")
    drop_paths(page, folders / "green" / "00.png", folders / "green" / "01.png")
    playwright.expect(page.get_by_text("2 photos have no folder")).to_be_visible()
    page.get_by_label("Their class").fill("lime")
    page.get_by_role("button", name="Add").click()
    playwright.expect(rows(page).nth(2)).to_contain_text("lime2 photos")


def test_what_is_no_zip_is_said(page: playwright.Page, tmp_path: Path) -> None:
    broken = tmp_path / "cut.zip"
    broken.write_bytes(b"PK\x03\x04 and no end")
    page.get_by_label("Drop a folder of photos for each class here").set_input_files(broken)
    playwright.expect(
        page.get_by_role("alert").filter(has_text="cut.zip is not a zip")
    ).to_be_visible()


def test_a_huge_folder_is_refused_as_a_whole(
    page: playwright.Page, live: Live, tmp_path: Path
) -> None:
    for number in range(6000):
        (tmp_path / "huge" / f"class {number % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "huge" / f"class {number % 3}" / f"{number}.png").touch()
    drop_paths(page, tmp_path / "huge")
    told = page.get_by_role("alert").filter(has_text="More than 5000 files at once")
    playwright.expect(told).to_be_visible()
    assert live.http.get("/inbox").json()["total"] == 0


def test_one_photo_under_two_classes_is_asked_about(
    page: playwright.Page, folders: Path, tmp_path: Path
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        shutil.copy(folders / "red" / "00.png", tmp_path / name)
    drop_paths(page, tmp_path / "cat", tmp_path / "dog")
    playwright.expect(rows(page).nth(0)).to_contain_text("cat1 photo")
    rows(page).nth(1).get_by_text("1 could not be used").click()
    playwright.expect(rows(page).nth(1)).to_contain_text(
        "the same picture is labelled 'cat' already"
    )


def test_every_answer_can_be_corrected(
    browser: playwright.Browser, trained_copy: TrainedStore
) -> None:
    with live_server(trained_copy.location, admin_token=None) as live:
        live.wait_until_ready()
        with watching(browser, live.url) as watched:
            page = watched.page
            page.locator("#files").set_input_files(
                {"name": "a.png", "mimeType": "image/png", "buffer": png(3, size=24)}
            )
            page.get_by_text("Wrong? Label it").click()
            page.get_by_label("Its class").fill("zebra")
            page.get_by_role("button", name="Save").click()
            playwright.expect(page.get_by_text("It waits in the inbox as zebra")).to_be_visible()
        (item,) = live.http.get("/inbox").json()["items"]
        assert (item["judgement"]["label"], item["rules"]) == ("zebra", ["taught"])


def test_answers_cannot_be_corrected_by_who_may_not_label(
    browser: playwright.Browser, trained_copy: TrainedStore
) -> None:
    with live_server(trained_copy.location) as live:
        live.wait_until_ready()
        with watching(browser, live.url) as watched:
            page = watched.page
            page.locator("#files").set_input_files(
                {"name": "a.png", "mimeType": "image/png", "buffer": png(3, size=24)}
            )
            playwright.expect(page.locator(".answer")).to_be_visible()
            playwright.expect(page.get_by_text("Wrong? Label it")).to_be_hidden()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_first_task_is_taught_in_the_browser_alone(
    browser: playwright.Browser,
    trained_store: TrainedStore,
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a server without a store to answers, with a real trainer beside it: two clicks besides
    the drop, and no prompt for a token, as the link that `dne-serve` prints brings one."""
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "cache" / "backbones" / "vit-tiny"
    place.mkdir(parents=True, mode=0o700)
    shutil.copy(trained_store.folder / "vit.safetensors", place / "model.safetensors")
    (place / "preprocessor_config.json").write_text(
        '{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}'
    )
    with live_server(tmp_path / "models", with_trainer=True) as live:
        with watching(browser, live.url, path=f"/label#token={TOKEN}") as watched:
            page = watched.page
            playwright.expect(page.get_by_label("Begin with")).to_have_value("vit-tiny")
            drop_paths(page, *(folders / colour for colour in COLOURS))
            playwright.expect(page.get_by_text("36 labels wait for learning")).to_be_visible()
            page.get_by_role("button", name="Learn…").click()  # the first action
            page.get_by_role("dialog").get_by_role("button", name="Learn").click()  # the second
            verdict = page.get_by_role("group", name="Verdict")
            playwright.expect(verdict).to_contain_text("Version 1 was promoted", timeout=MINUTES)
            playwright.expect(page.get_by_label("Begin with")).to_be_hidden()
        live.wait_until_ready()
        answers = live.predict(*(picture(colour, 999) for colour in COLOURS)).json()
        assert [one["label"] for one in answers["predictions"]] == list(COLOURS)
        manifest = live.serving.open_store().manifest(1)
        assert str(manifest.tasks[0].training["pretrained_from"]).startswith("timm/vit_tiny")


def test_an_answer_shows_what_it_looks_like(
    browser: playwright.Browser, trained_copy: TrainedStore
) -> None:
    with live_server(trained_copy.pretrained, admin_token=None) as live:
        live.wait_until_ready()
        with watching(browser, live.url) as watched:
            page = watched.page
            page.locator("#files").set_input_files(
                {"name": "a.png", "mimeType": "image/png", "buffer": trained_copy.image("0")}
            )
            page.get_by_text("Why?").click()
            near = page.get_by_role("list", name="Kept images that a.png looks like")
            playwright.expect(near.get_by_role("listitem")).to_have_count(4)
            playwright.expect(page.get_by_text("Because it looks like these")).to_be_visible()
            playwright.expect(near.get_by_role("img").nth(3)).to_be_visible()


def test_more_like_this_selects_what_looks_alike(
    browser: playwright.Browser, trained_copy: TrainedStore
) -> None:
    with live_server(trained_copy.pretrained, collect="sample=100%", admin_token=None) as live:
        live.wait_until_ready()
        live.predict(*(picture(colour, seed) for colour in COLOURS for seed in (1, 2, 3)))
        # The writer gives way to all others on a busy machine, and leaves near-duplicates out.
        wait_for(lambda: live.http.get("/inbox").json()["total"] >= 4, seconds=60)
        with watching(browser, live.url, path="/label") as watched:
            page = watched.page
            tiles = page.get_by_role("listbox", name="Images").get_by_role("option")
            playwright.expect(tiles.nth(3)).to_be_visible()
            tiles.first.focus()
            page.get_by_role("button", name="Select more like this").click()
            playwright.expect(page.locator("#panel-title")).to_contain_text("images")
            assert 1 < page.locator('.tile[aria-selected="true"]').count() <= 9
