from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dne_serve
from model_store.maintenance.edit_classes import Care, rename_class, retire_class
from model_store.maintenance.forget import forget_class
from model_store.preprocess import encode_png
from model_store.report.ancestry import AncestryCache
from model_store.report.facts import make_report
from model_store.store.store import Store
from tests.chromium import CHROMIUM, chromium
from tests.trainer.folders import Listening, asked, write_classes
from trainer.add_task import add_task
from trainer.cli import main
from trainer.evaluation.judged import judge
from trainer.report.report import SCRIPTS, measure_report, page
from trainer.request import GateLimits

HOSTILE = "<script>alert(1)<|script>"  # no folder name may hold a slash
VERY_HOSTILE = "</script><img src=x onerror=alert(1)><!--"
CONSOLE = Path(dne_serve.__file__).parent / "console"
DECLARED = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)
IMPORTED = re.compile(r'^import .* from "\./([^"]+)";$', re.MULTILINE)


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
    return measured(store, version)[0]


def measured(store: Store, version: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures for programs, and the facts of the page."""
    return measure_report(store, store.manifest(version), device="cpu", progress=Listening())


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
    from model_store.maintenance.forget import delete_version

    shutil.copytree(grown.location, tmp_path / "models")
    store = Store.open(str(tmp_path / "models"))
    delete_version(store, 2, actor="tests", reason="")
    report = report_of(store, 4)
    assert [one["version"] for one in report["growth"]] == [1, 3, 4]
    assert report["forgetting"]["versions"] == [1, 3, 4]


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
    after, facts = measured(store, 2)
    assert (before["source"], after["source"]) == ("held-out", "recorded")
    for part in ("accuracy", "classes", "confusion", "images"):
        assert after[part] == before[part]
    assert not facts["measured_anew"]
    assert facts["notes"][0] == "The held-out images of ant were forgotten."


def test_nothing_held_out_is_nothing_claimed(tmp_path: Path) -> None:
    data = write_classes(tmp_path / "few", ["a", "b"], images=4)
    add_task(asked(tmp_path / "models", data), progress=Listening())
    assert main(["report", "1", "--out", str(tmp_path), "--store", str(tmp_path / "models")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["images"], report["accuracy"]["all"], report["source"]) == (0, None, "none")
    assert report["notes"] == ["Nothing is held out of a, b: too few images."]
    facts = facts_in((tmp_path / "report.html").read_text())
    assert facts["source"] == "none"
    assert "no images were held out" in facts["notes"][1]


class Page(HTMLParser):
    """The elements of a page: their tags, their addresses, and the text of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"] and data.strip():
            self.scripts.append(data)


def read(text: str) -> Page:
    page = Page()
    page.feed(text)
    return page


def facts_in(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read(text).scripts[0])
    return found


def test_the_command_writes_the_figures_and_prints_them(
    grown: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    asked_for = ["report", "4", "--out", str(out), "--store", grown.location, "--json"]
    assert main(asked_for) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed.pop("paths") == [str(out / "report.json"), str(out / "report.html")]
    assert printed == json.loads((out / "report.json").read_text())
    assert set(printed) == {
        "version", "parent", "created", "digest", "images", "source", "verdict", "notes",
        "accuracy", "recorded", "classes", "retired", "confusion", "forgetting", "calibration",
        "levels", "growth", "advice", "proposal",
    }  # fmt: skip


def test_the_page_stands_alone_and_takes_no_name_for_markup(grown: Store) -> None:
    _, facts = measured(grown, 4)
    facts["retired"] = [f"{VERY_HOSTILE}\ud800"]
    text = page(facts)
    found = read(text)
    assert found.addresses == []
    assert found.tags.count("script") == 2
    assert set(found.tags).isdisjoint({"link", "img", "iframe", "object", "form", "a"})
    assert not re.search(r"url\(|@import|https?://", text)
    assert "<img" not in text
    assert facts_in(text) == facts


def test_the_policy_allows_one_script_and_one_style(grown: Store) -> None:
    found = read(page(measured(grown, 4)[1]))
    digest = base64.b64encode(hashlib.sha256(found.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in found.policy
    assert found.policy.startswith("default-src 'none';")
    assert "unsafe" not in found.policy


def test_the_scripts_of_the_page_fit_into_one() -> None:
    """No name is declared twice, and every script stands below those that it imports."""
    scripts = {name: (CONSOLE / name).read_text() for name in SCRIPTS}
    names = [name for text in scripts.values() for name in DECLARED.findall(text)]
    assert sorted(names) == sorted(set(names))
    for place, text in enumerate(scripts.values()):
        assert set(IMPORTED.findall(text)) <= set(SCRIPTS[:place])
        assert "</script" not in text
        assert "<!--" not in text


def test_the_page_has_the_facts_that_a_server_tells(grown: Store) -> None:
    """The measured shares are those that were recorded, because the images are the same."""
    told = make_report(
        grown, grown.manifest(2), ancestry=AncestryCache().of(grown, grown.manifest(2))
    )
    recorded = told.model_dump(mode="json", by_alias=True)
    _, facts = measured(grown, 2)
    assert set(facts) - set(recorded) == {"advice", "levels", "measured_anew"}
    assert facts["measured_anew"]
    for name in ("accuracy", "classes", "matrix", "growth", "unknown", "run", "gate", "images"):
        assert facts[name] == recorded[name]


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
    _, facts = measured(grown, 4)
    facts["classes"][0]["label"] = VERY_HOSTILE
    facts["advice"] = {"lines": [{"text": VERY_HOSTILE, "images": []}], "classes": []}
    facts["levels"] = {
        "answered_by_groups": 0.5,
        "right_of_these": None,
        "right_at_any_level": 0.25,
    }
    dot = base64.b64encode(encode_png(np.zeros((8, 8, 3), dtype=np.uint8))).decode()
    shown = {"label": "ant", "answer": VERY_HOSTILE, "before": None, "confidence": 0.5}
    facts["pictures"] = [
        {"number": 0, **shown, "src": f"data:image/png;base64,{dot}"},
        {"number": 1, **shown, "src": None},
    ]
    (tmp_path / "report.html").write_text(page(facts))
    complaints: list[str] = []
    asked_for: list[str] = []
    with chromium() as browser:
        page_shown = browser.new_page(viewport={"width": 390, "height": 800})
        page_shown.on("console", lambda message: complaints.append(message.text))
        page_shown.on("pageerror", lambda error: complaints.append(str(error)))
        page_shown.on("dialog", lambda dialog: complaints.append(dialog.message))
        page_shown.on("request", lambda request: asked_for.append(request.url))
        page_shown.goto((tmp_path / "report.html").as_uri())
        page_shown.wait_for_function("document.querySelector('.pictures img')?.naturalWidth === 8")
        headings = page_shown.get_by_role("heading", level=2).all_text_contents()
        frames = page_shown.locator(".frame").all_text_contents()
        beside = page_shown.locator(".matrix text").all_text_contents()
        shown_names = page_shown.get_by_text(VERY_HOSTILE, exact=True).count()
        images = page_shown.locator("main img").count()
        width = page_shown.evaluate("document.documentElement.scrollWidth")
    assert complaints == []
    assert [url for url in asked_for if not url.startswith("data:")] == asked_for[:1]
    assert headings == [
        "Verdict", "Images", "What would help most", "Tasks", "Growth", "Classes", "Confusion",
        "Calibration", "Unknown images", "Groups", "How it was trained",
    ]  # fmt: skip
    assert frames == ["", "not kept"]
    assert {"bus", "van"} <= set(beside)  # the matrix names its rows and columns
    assert shown_names >= 4  # in the tables, the advice and below the pictures
    assert images == 1
    assert width <= 390  # wide tables scroll in their own box
