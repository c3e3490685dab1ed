"""Versions of one store that grew by every step stand beside each other on a server."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from model_store.store.store import Store
from tests.live_server import Live, live_server, wait_for
from tests.machine import know_machine, run_folder
from tests.trainer.folders import pixels_of, write_classes
from tests.trainer.vit import write_vit
from trainer.cli import main as dne_train

pytestmark = pytest.mark.timeout(600)
QUICK, ADAPTED, LATER, DENSE = 1, 2, 3, 4
NAMES = ("a", "b", "0", "1")


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick version and its adapted child, a later quick one and its child with an expert."""
    folder = tmp_path_factory.mktemp("grown")
    vit, store = write_vit(folder / "vit.safetensors"), folder / "models"
    letters = write_classes(folder / "letters", ["a", "b"])
    digits = write_classes(folder / "digits", ["0", "1"])
    start = ["--pretrained", str(vit), "--normalise", "imagenet", "--readout", "wide"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DNE_CACHE", str(run_folder(tmp_path_factory) / "cache"))
        know_machine()
        for data, options in (
            (letters, [*start, "--grow", "adapt"]),
            (digits, ["--grow", "expert"]),
        ):
            asked = ["add-task", "--data", str(data), "--store", str(store), *options]
            assert dne_train([*asked, "--force", "--epochs", "2", "--device", "cpu"]) == 0
    manifests = [Store.open(str(store)).manifest(one) for one in (QUICK, ADAPTED, LATER, DENSE)]
    assert [one.adapted for one in manifests] == [False, True, False, False]
    assert [bool(one.deepened) for one in manifests] == [False, False, False, True]
    return store


def pictures(count: int = 1) -> list[bytes]:
    made = []
    for name in NAMES:
        for pixels in pixels_of(name, count, seed=99):
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG")
            made.append(buffer.getvalue())
    return made


def ask(live: Live, query: str = "") -> dict[str, Any]:
    answer: dict[str, Any] = live.predict(*pictures(), query=query).json()
    return answer


def move(store: Path, version: int) -> None:
    Store.open(str(store)).rollback(channel="production", to=version, actor="tests", reason="")


@pytest.mark.parametrize(
    ("served", "beside"),
    [(QUICK, ADAPTED), (ADAPTED, QUICK), (LATER, DENSE)],
    ids=["adapted-beside-quick", "quick-beside-adapted", "expert-beside-quick"],
)
def test_a_grown_version_is_a_canary_and_a_shadow_of_the_one_that_it_grew_from(
    grown: Path, served: int, beside: int
) -> None:
    move(grown, served)
    alone = {}
    for version in (served, beside):
        with live_server(grown) as live:
            live.wait_until_ready()
            alone[version] = ask(live, f"?version={version}")["predictions"]
    with live_server(grown, canary=f"{beside}=50%,shadow={beside}") as live:
        wait_for(lambda: live.http.get("/readyz").json().get("shadow") == beside)
        wait_for(lambda: live.http.get("/readyz").json().get("canary") == beside)
        answers = [ask(live) for _ in range(4)]
        assert sorted(one["version"] for one in answers) == sorted([served, beside] * 2)
        # Two backbones compute what one of them computes alone.
        assert all(one["predictions"] == alone[one["version"]] for one in answers)
        by_served = 2 * len(NAMES)
        seen = 'dne_shadow_images_total{label="%s"}'
        wait_for(lambda: live.metric(seen % "same") + live.metric(seen % "other") == by_served)
        same = sum(
            one["label"] == other["label"]
            for one, other in zip(alone[served], alone[beside], strict=True)
        )
        assert live.metric(seen % "same") == 2 * same


def test_a_running_server_goes_back_over_each_step_and_forward_again(grown: Path) -> None:
    move(grown, DENSE)
    with live_server(grown) as live:
        live.wait_until_serving(DENSE)
        first = {one: ask(live, f"?version={one}") for one in (DENSE, LATER, ADAPTED, QUICK)}
        for _, earlier in pairwise(first):
            done = live.admin("/rollback", to=earlier, reason="a test")
            assert done.status_code == 200, done.text
            assert ask(live)["version"] == earlier
            assert ask(live)["predictions"] == first[earlier]["predictions"]
        done = live.admin("/promote", to=DENSE, reason="a test")
        assert done.status_code == 200, done.text
        assert ask(live)["predictions"] == first[DENSE]["predictions"]
