"""The page at `/` in a real Chromium: predictions."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model_store.records.quality import Unknown
from model_store.store.store import Store
from tests.e2e.browsing import (
    NEEDS_CHROMIUM,
    Watched,
    box_of,
    drop,
    drop_paths,
    playwright,
    watching,
)
from tests.live_server import Live, live_server, png
from tests.tiny_versions import promote, publish_tiny

pytestmark = NEEDS_CHROMIUM
expect = playwright.expect
MANY = 40


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Serves version 2 to all tests of this file; at most 16 images may wait."""
    folder = tmp_path_factory.mktemp("console")
    store = Store.create(str(folder / "models"))
    first = promote(store, publish_tiny(store, tasks=[("letters", ["a", "b"])]))
    promote(store, publish_tiny(store, tasks=[("odd", ["c", "d"])], parent=first, seed=1))
    nothing_is_known = Unknown(score="max-logit", threshold=1e9, rate=0.1, images=9)
    publish_tiny(store, seed=2, unknown=nothing_is_known)
    with live_server(folder / "models", max_queue=16, max_images=16) as live:
        live.wait_until_ready()
        yield live


@pytest.fixture
def watched(browser: playwright.Browser, live: Live) -> Iterator[Watched]:
    with watching(browser, live.url) as watched:
        expect(watched.page.locator("#versions .version")).to_have_count(3)
        yield watched


def images(count: int) -> list[tuple[str, bytes]]:
    return [(f"{index}.png", png(index)) for index in range(count)]


def test_an_image_dropped_on_the_page_shows_its_class_and_the_version(
    watched: Watched, live: Live
) -> None:
    image = png(1, size=32)
    [expected] = live.predict(image).json()["predictions"]
    drop(watched.page, ("noise.png", image))
    answer = watched.page.locator("#answers .answer")
    expect(answer).to_have_count(1)
    expect(answer.locator(".label")).to_contain_text(expected["label"])
    expect(answer.locator(".about")).to_contain_text("version 2")
    expect(answer.locator(".about")).to_contain_text("noise.png")
    expect(answer.locator(".bar")).to_have_count(4)
    widths = [box_of(bar)["width"] for bar in answer.locator(".fill").all()]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 0


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
    expect(page.locator("#answers .about").first).to_contain_text("version 1")
    names = page.locator("#answers .about").all_text_contents()
    assert ["0.png" in names[0], "1.png" in names[1]] == [True, True]


def test_an_unknown_image_is_headlined_as_such(watched: Watched) -> None:
    page = watched.page
    page.get_by_label("Answer with").select_option("3")
    drop(page, ("noise.png", png()))
    answer = page.locator("#answers .answer")
    expect(answer.locator(".label")).to_have_text("Unknown")
    expect(answer.locator(".nearest")).to_contain_text("Closest class: ")
    expect(answer.locator(".nearest")).not_to_contain_text("%")


def test_a_dropped_folder_is_its_images(watched: Watched, tmp_path: Path) -> None:
    page = watched.page
    folder = tmp_path / "holiday"
    (folder / "inner").mkdir(parents=True)
    for name in ("a.png", "inner/b.png"):
        (folder / name).write_bytes(png())
    (folder / "notes.txt").write_text("hello")
    drop_paths(page, folder)
    expect(page.locator("#answers .answer")).to_have_count(2)
    expect(page.locator("#answers")).to_contain_text("b.png")
    expect(page.locator("#predict-error")).to_have_text("1 file that is not an image was left out.")


def test_good_answers_stay_beside_a_bad_file(watched: Watched) -> None:
    page = watched.page
    drop(page, ("a.png", png(1)), ("notes.txt", b"hello"), ("b.png", png(2)))
    rows = page.locator("#answers .answer")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_contain_text("a.png")
    expect(rows.nth(1)).to_contain_text("No answer")
    expect(rows.nth(1).locator(".error")).to_contain_text("'notes.txt'")
    expect(rows.nth(2)).to_contain_text("b.png")
    expect(page.locator("#told")).to_contain_text("3 images")
    expect(page.locator("#told")).to_contain_text("1 refused")


def test_more_images_than_may_wait_are_sent_in_groups_and_told_of_while_they_are(
    watched: Watched, live: Live
) -> None:
    page = watched.page
    with live.engine_held():
        drop(page, *images(MANY))
        expect(page.locator("#progress")).to_be_visible()
        expect(page.locator("#progress-text")).to_contain_text(f"0 of {MANY} images")
    expect(page.locator("#answers .answer")).to_have_count(MANY)
    expect(page.locator("#progress")).to_be_hidden()
    expect(page.locator("#told")).to_contain_text(f"{MANY} images in")
    about = page.locator("#answers .about").all_text_contents()
    assert [line.rpartition(" ")[2] for line in about] == [name for name, _ in images(MANY)]
    assert set(watched.predicted) == {200}


def test_many_answers_are_summed_up_filtered_and_saved(
    watched: Watched, live: Live, tmp_path: Path
) -> None:
    page = watched.page
    files = [(f"{number}.png", png(number)) for number in range(11)]
    drop(page, *files, ('=1+"1".png', b"no image"))
    playwright.expect(page.locator("#answers .answer")).to_have_count(12)
    labels = Counter(
        "Unknown" if one["unknown"] else one["label"]
        for _, data in files
        for one in live.predict(data).json()["predictions"]
    )
    kinds = page.get_by_role("group", name="Answers by class").get_by_role("button")
    expected = {**labels, "No answer": 1}
    playwright.expect(kinds).to_have_count(len(expected))
    assert {
        text.rpartition(" ")[0]: int(text.rpartition(" ")[2]) for text in kinds.all_inner_texts()
    } == expected
    shown = page.locator("#answers .answer:visible")
    kinds.filter(has_text="No answer").click()
    playwright.expect(shown).to_have_count(1)
    kinds.filter(has_text="No answer").click()
    playwright.expect(shown).to_have_count(12)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as CSV").click()
    download.value.save_as(tmp_path / "answers.csv")
    with (tmp_path / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["filename"] for row in rows[:11]] == [name for name, _ in files]
    assert Counter(row["label"] for row in rows if row["unknown"] == "false")
    assert rows[-1]["filename"] == '\'=1+"1".png'
    assert rows[-1]["error"]


def test_the_rest_can_be_stopped(watched: Watched, live: Live) -> None:
    page = watched.page
    with live.engine_held():
        drop(page, *images(MANY))
        page.get_by_role("button", name="Stop").click()
    expect(page.locator("#told")).to_contain_text("8 images in")
    expect(page.locator("#answers .answer")).to_have_count(8)


def test_a_busy_server_is_asked_again_and_not_for_ever(watched: Watched) -> None:
    page, asked = watched.page, []

    def busy(route: playwright.Route) -> None:
        asked.append(route.request.url)
        if len(asked) in (2, 9):
            route.continue_()
        else:
            route.fulfill(status=503, headers={"Retry-After": "0.01"}, json={"detail": "full"})

    page.route("**/predict?*", busy)
    drop(page, ("a.png", png(1)))
    expect(page.locator("#answers .answer")).to_have_count(1)
    drop(page, *images(12))
    expect(page.locator("#predict-error")).to_contain_text("12 images were not answered: full")
    assert len(asked) == 2 + 5
    drop(page, ("b.png", png(1)))
    expect(page.locator("#predict-error")).to_be_hidden()
    expect(page.locator("#answers .answer")).to_have_count(2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser: playwright.Browser, live: Live, scheme: str) -> None:
    phone: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme}
    with watching(browser, live.url, **phone) as watched:
        page = watched.page
        drop(page, ("a-file-with-quite-a-long-name-" * 4 + ".png", png()))
        expect(page.locator("#answers .answer")).to_have_count(1)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_name_that_is_read_from_right_to_left_moves_no_number(
    browser: playwright.Browser, tmp_path: Path
) -> None:
    store = Store.create(str(tmp_path / "models"))
    promote(store, publish_tiny(store, tasks=[("letters", ["שלום", "مرحبا"])]))
    with live_server(tmp_path / "models") as live, watching(browser, live.url) as watched:
        drop(watched.page, ("a.png", png()))
        parts = watched.page.locator("#answers .label bdi")
        expect(parts).to_have_count(2)
        name, share = parts.all()
        expect(share).to_contain_text("%")
        assert box_of(name)["x"] < box_of(share)["x"]
        assert box_of(share)["height"] < 2 * box_of(name)["height"]
