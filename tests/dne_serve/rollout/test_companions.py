"""Canaries and shadows: a version that answers a share of the requests, one that is compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dne_serve.rollout.canary import CanaryAndShadow
from dne_serve.setting_values import Canary
from dne_serve.settings import load_settings
from model_store.errors import WrongUsage
from model_store.records.manifest import Manifest
from model_store.spec import Readout
from model_store.store.store import Store
from tests.live_server import Live, live_server, png, wait_for
from tests.tiny_versions import TINY, flip_last_bit, promote, publish_tiny

IMAGES = [png(seed) for seed in range(4)]


def publish_branch(store: Store, parent: Manifest) -> Manifest:
    return publish_tiny(store, tasks=[("side", ["x", "y"])], parent=parent, seed=3)


def predict(live: Live, count: int) -> list[dict[str, object]]:
    return [live.predict(*IMAGES).json() for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "version", "share"),
    [("7=5%", 7, 0.05), ("1=100%", 1, 1.0), ("12=0.25%", 12, 0.0025)],
)
def test_a_canary_is_a_version_and_a_share(text: str, version: int, share: float) -> None:
    found = Canary.parse(text)
    assert (found.version, found.share) == (version, pytest.approx(share))


@pytest.mark.parametrize("text", ["7", "7=5", "x=5%", "7=0%", "7=101%", "0=5%", "7=-1%", "7=5%%"])
def test_anything_else_is_wrong_usage(text: str) -> None:
    with pytest.raises(WrongUsage, match="canary"):
        load_settings(canary=text)


@pytest.mark.parametrize("share", [25, 40])
def test_a_canary_answers_its_share_and_is_marked(
    store: Store, digits: Manifest, share: int
) -> None:
    store.rollback(channel="production", to=1, actor="tests", reason="")
    with live_server(Path(store.location), canary=f"2={share}%") as live:
        wait_for(lambda: live.http.get("/readyz").json().get("canary") == 2)
        answers = predict(live, 20)
        by_canary = [one for one in answers if one["version"] == 2]
        assert len(by_canary) == 20 * share / 100
        assert all(one["canary"] is (one["version"] == 2) for one in answers)
        asked = live.predict(png(), query="?version=2").json()
        assert asked["canary"] is False  # whoever asks for a version gets no canary
        images = len(IMAGES) * len(by_canary)
        assert live.metric('dne_answered_images_total{by="canary"}') == images
        assert live.metric('dne_answered_images_total{by="served"}') == 80 - images
        assert live.metric('dne_answered_images_total{by="asked"}') == 1


def test_a_narrow_version_is_compared_with_a_wide_one_and_a_canary_of_it(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "models"))
    narrow = replace(TINY, depth=2, token="in-sequence")
    wide = replace(narrow, readout=Readout(blocks=(1,), grid_block=1, grid=2))
    for spec in (narrow, wide):
        publish_tiny(store, spec=spec)
    promote(store, store.manifest(1))
    with live_server(Path(store.location), canary="2=50%,shadow=2") as live:
        wait_for(lambda: live.http.get("/readyz").json().get("shadow") == 2)
        answers = predict(live, 4)
        assert {one["version"] for one in answers} == {1, 2}
        by_served = len(IMAGES) * sum(one["version"] == 1 for one in answers)
        seen = 'dne_shadow_images_total{label="%s"}'
        wait_for(lambda: live.metric(seen % "same") + live.metric(seen % "other") == by_served)
    for version in (1, 2):
        promote(store, store.manifest(version))
        with live_server(Path(store.location)) as alone:
            alone.wait_until_serving(version)
            expected = alone.predict(*IMAGES).json()["predictions"]
        told = [one["predictions"] for one in answers if one["version"] == version]
        assert all(one == expected for one in told)


def test_a_canary_that_is_served_itself_is_none(store: Store, digits: Manifest) -> None:
    with live_server(Path(store.location), canary="2=50%") as live:
        wait_for(lambda: live.http.get("/readyz").json().get("canary") == 2)
        assert not any(one["canary"] for one in predict(live, 4))


@pytest.mark.parametrize("of_the_lineage", [True, False])
def test_a_shadow_is_compared_and_answers_nobody(
    store: Store, letters: Manifest, digits: Manifest, of_the_lineage: bool
) -> None:
    shadow = digits if of_the_lineage else publish_branch(store, letters)
    if of_the_lineage:
        store.rollback(channel="production", to=1, actor="tests", reason="")
    with live_server(Path(store.location), canary=f"shadow={shadow.version}") as live:
        wait_for(lambda: live.http.get("/readyz").json().get("shadow") == shadow.version)
        served = live.http.get("/readyz").json()["version"]
        answers = predict(live, 3)
        assert {one["version"] for one in answers} == {served}
        expected = live.predict(*IMAGES, query=f"?version={shadow.version}").json()
        own = live.predict(*IMAGES, query=f"?version={served}").json()
        same = sum(
            one["label"] == other["label"]
            for one, other in zip(own["predictions"], expected["predictions"], strict=True)
        )
        seen = 'dne_shadow_images_total{label="%s"}'
        wait_for(lambda: live.metric(seen % "same") + live.metric(seen % "other") == 12)
        assert live.metric(seen % "same") == 3 * same
        assert answers[0]["predictions"] == own["predictions"]


def test_a_shadow_of_the_lineage_costs_no_pass_of_its_own(store: Store, digits: Manifest) -> None:
    store.rollback(channel="production", to=1, actor="tests", reason="")
    with live_server(Path(store.location), canary="shadow=2") as live:
        wait_for(lambda: live.http.get("/readyz").json().get("shadow") == 2)
        before = live.metric("dne_images_total")
        predict(live, 3)
        assert live.metric("dne_images_total") - before == 12


def test_a_companion_that_cannot_be_loaded_takes_nothing_from_the_served_version(
    store: Store, letters: Manifest, digits: Manifest
) -> None:
    side = publish_branch(store, letters)
    flip_last_bit(store, side.experts[-1])
    with live_server(Path(store.location), canary=f"{side.version}=50%,shadow=99") as live:
        live.wait_until_ready()
        answers = predict(live, 4)
        assert {one["version"] for one in answers} == {2}
        ready = live.http.get("/readyz").json()
        assert (ready["canary"], ready["shadow"], ready["error"]) == (None, None, None)


def test_companions_stay_when_others_leave(store: Store, digits: Manifest) -> None:
    with live_server(
        Path(store.location), canary="shadow=1", max_resident=1, idle_seconds=0.05
    ) as live:
        wait_for(lambda: live.http.get("/readyz").json().get("shadow") == 1)
        other = publish_tiny(store, tasks=[("greek", ["alpha"])], parent=digits, seed=5)
        assert live.predict(png(), query=f"?version={other.version}").status_code == 200
        wait_for(lambda: live.metric("dne_resident_versions") == 2)
        promote(store, other)
        live.wait_until_serving(other.version)
        assert live.http.get("/readyz").json()["shadow"] == 1
        assert live.serving.loaded.find_version(1) is not None


def test_the_share_is_exact_without_chance() -> None:
    companions = CanaryAndShadow(Canary(version=2, share=0.05), None, loaded=None)  # type: ignore[arg-type]
    due = [companions._is_due() for _ in range(1000)]
    assert sum(due) == 50
    assert due[:20].count(True) == 1
