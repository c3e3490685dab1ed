from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_store.maintenance.edit_classes import Care, rename_class, retire_class
from model_store.maintenance.forget import forget_class
from model_store.store.store import Store
from tests.chromium import CHROMIUM, chromium
from tests.trainer.folders import Listening, asked, write_classes
from trainer.add_task import add_task
from trainer.cli import main
from trainer.evaluation.judged import judge
from trainer.report.history import lineage_of
from trainer.report.html import page
from trainer.report.report import make_report
from trainer.request import GateLimits

HOSTILE = "<script>alert(1)<|script>"  # no folder name may hold a slash


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """1 and 2 learn two tasks, 3 retires bee, 4 calls cow by a hostile name."""
    folder = tmp_path_factory.mktemp("report")
    for name, classes in (("animals", ["ant", "bee", "cow"]), ("cars", ["bus", "van"])):
        data = write_classes(folder / name, classes, images=40)
        limits = GateLimits(force=True)  # an epoch of learning may not please the gate
        add_task(asked(folder / "models", data, limits=limits), progress=Listening())
    store = Store.open(str(folder / "models"))
    care = Care(store=store, channel="production", actor="tests")
    retire_class("bee", care=care)
    rename_class("cow", HOSTILE, care=care)
    return store


def report_of(store: Store, version: int) -> dict[str, Any]:
    return make_report(store, store.manifest(version), device="cpu", progress=Listening())


def test_the_figures_are_those_that_were_measured_when_the_version_was_made(grown: Store) -> None:
    for version in (1, 2):
        report, metrics = report_of(grown, version), grown.manifest(version).metrics
        assert report["images"] == metrics.images
        assert report["accuracy"]["all"] == pytest.approx(metrics.accuracy.all)
        found = {one["name"]: one["accuracy"] for one in report["classes"]}
        assert found == pytest.approx(metrics.per_class)


def test_older_versions_answer_from_the_newest_network_as_they_did(grown: Store) -> None:
    from model_store.codec import load_network
    from trainer.data.exemplars import recall

    forgetting = report_of(grown, 2)["forgetting"]
    first = grown.manifest(1)
    images = recall(
        grown.manifest(2).held_out[:3],
        classes=first.spec.classes,
        read=grown.read_shard,
        preprocessing=first.preprocessing,
    )
    network = load_network(grown.read_shard, first)
    judged = judge(network, images, preprocessing=first.preprocessing)
    assert forgetting["versions"] == [1, 2]
    animals, cars = forgetting["tasks"]
    assert animals["learnt"] == pytest.approx(judged.accuracy())
    assert cars["accuracy"][0] is None
    best = max(animals["accuracy"])
    assert animals["forgetting"] == pytest.approx(best - animals["now"])
    assert forgetting["average"] == animals["forgetting"]  # the newest task is left out


def test_the_confusion_matrix_counts_every_image_once(grown: Store) -> None:
    report = report_of(grown, 2)
    counts = np.array(report["confusion"]["counts"])
    assert counts.sum() == report["images"]
    assert counts.sum(axis=1).tolist() == [one["images"] for one in report["classes"]]
    assert np.trace(counts) / counts.sum() == pytest.approx(report["accuracy"]["all"])
    bins = report["calibration"]["bins"]
    assert sum(one["images"] for one in bins) == report["images"]
    gaps = [one["images"] * abs(one["confidence"] - one["accuracy"]) for one in bins]
    assert sum(gaps) / report["images"] == pytest.approx(report["calibration"]["error"])


def test_class_care_shows_in_the_report(grown: Store) -> None:
    report = report_of(grown, 4)
    assert [one["name"] for one in report["classes"]] == ["ant", HOSTILE, "bus", "van"]
    assert report["retired"] == ["bee"]
    assert len(report["confusion"]["counts"]) == 4
    assert [one["change"] for one in report["growth"]] == [
        "learnt animals: ant, bee, cow",
        "learnt cars: bus, van",
        "retired bee",
        f"renamed cow to {HOSTILE}",
    ]
    assert [one["delta_bytes"] > 0 for one in report["growth"]] == [True, True, False, False]
    assert [one["classes"] for one in report["growth"]] == [3, 5, 4, 4]
    # What a retirement left in the manifest is what was measured, or less.
    recorded = grown.manifest(3).metrics.accuracy.all
    assert recorded is not None
    assert report["accuracy"]["all"] >= recorded - 1e-9


def test_a_deleted_ancestor_is_passed_over(grown: Store, tmp_path: Path) -> None:
    from model_store.maintenance.delete import delete_version

    shutil.copytree(grown.location, tmp_path / "models")
    store = Store.open(str(tmp_path / "models"))
    delete_version(store, 2, actor="tests", reason="")
    assert [one.version for one in lineage_of(store, store.manifest(4))] == [1, 3, 4]
    assert report_of(store, 4)["forgetting"]["versions"] == [1, 3, 4]


def test_images_that_are_not_there_are_named(grown: Store, tmp_path: Path) -> None:
    shutil.copytree(grown.location, tmp_path / "models")
    store = Store.open(str(tmp_path / "models"))
    forget_class(store, "ant", actor="tests", reason="")
    report = report_of(store, 4)
    assert report["notes"] == ["The held-out images of ant were forgotten."]
    assert report["classes"][0]["accuracy"] is None
    assert report["classes"][2]["accuracy"] is not None


def test_a_version_keeps_its_figures_when_its_images_are_forgotten(
    grown: Store, tmp_path: Path
) -> None:
    shutil.copytree(grown.location, tmp_path / "models")
    store = Store.open(str(tmp_path / "models"))
    before = report_of(store, 2)
    for name in store.manifest(2).classes:
        forget_class(store, name, actor="tests", reason="")
    after = report_of(store, 2)
    assert (before["source"], after["source"]) == ("held-out", "recorded")
    for part in ("accuracy", "classes", "confusion", "images"):
        assert after[part] == before[part]
    assert "when it was published" in page(after)


def test_nothing_held_out_is_nothing_claimed(tmp_path: Path) -> None:
    data = write_classes(tmp_path / "few", ["a", "b"], images=4)
    add_task(asked(tmp_path / "models", data), progress=Listening())
    assert main(["report", "1", "--out", str(tmp_path), "--store", str(tmp_path / "models")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["images"], report["accuracy"]["all"], report["source"]) == (0, None, "none")
    assert report["notes"] == ["Nothing is held out of a, b: too few images."]
    assert "there is nothing to judge by" in (tmp_path / "report.html").read_text()


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_and_takes_no_name_for_markup(
    grown: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    asked_for = ["report", "4", "--out", str(out), "--store", grown.location, "--json"]
    assert main(asked_for) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed.pop("paths") == [str(out / "report.json"), str(out / "report.html")]
    assert printed == json.loads((out / "report.json").read_text())
    text = (out / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.addresses == []
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not re.search(r"url\(|@import|https?://", text)
    assert page.tags >= {"svg", "table", "polyline", "rect", "circle"}
    assert HOSTILE in page.text
    assert "<script" not in text


def test_a_report_that_cannot_be_made_says_why(
    grown: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--store", grown.location]
    assert main(["report", "99", "--out", str(tmp_path), *at]) == 1
    assert "there is no version 99" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", "1", "--out", str(tmp_path / "file"), *at]) == 1
    assert "cannot write to" in capsys.readouterr().err


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="THE REPORT WAS NOT LOOKED AT: no chromium here")
def test_a_browser_shows_the_page_without_a_complaint(grown: Store, tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="REPORT NOT TRIED: Playwright")
    assert main(["report", "4", "--out", str(tmp_path), "--store", grown.location]) == 0
    complaints: list[str] = []
    asked_for: list[str] = []
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 420, "height": 800})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: asked_for.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        assert page.locator("svg").count() == 4
        assert page.get_by_role("heading", level=2).count() == 5
        width = page.evaluate("document.documentElement.scrollWidth")
    assert complaints == []
    assert len(asked_for) == 1
    assert width <= 420  # wide tables scroll in their own box
