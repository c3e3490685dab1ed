"""A group answers over HTTP where every class is in doubt."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from model_store.records.hierarchy import Hierarchy, Levels
from model_store.store.store import Store
from tests.live_server import live_server, png
from tests.tiny_versions import promote, publish_tiny

IMAGES = [png(seed) for seed in range(12)]
TASKS = [("letters", ["a", "b", "c", "d"])]
GROUPS = Hierarchy(parents={"a": "vowel", "b": "consonant", "c": "consonant", "d": "consonant"})


def test_a_group_answers_where_every_class_is_in_doubt(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "models"))
    publish_tiny(store, tasks=TASKS, spread=0.3)
    promote(store, publish_tiny(store, tasks=TASKS, spread=0.3, hierarchy=GROUPS))
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        found = live.predict(*IMAGES, query="?top_k=4").json()["predictions"]
        plain = live.predict(*IMAGES, query="?top_k=4&version=1").json()["predictions"]
        shown = live.http.get("/versions/2").json()["parents"]
    assert shown == GROUPS.parents
    levels = Levels(GROUPS, TASKS[0][1])
    for one, before in zip(found, plain, strict=True):
        assert one["top"] == before["top"]
        assert before["level"] == 0
        by_label = {row["label"]: row["score"] for row in one["top"]}
        expected = levels.higher([by_label[label] for label in TASKS[0][1]])
        if expected is None:
            assert (one["label"], one["level"]) == (before["label"], 0)
        else:
            assert (one["label"], one["level"]) == (expected.name, 1)
            assert np.isclose(one["score"], expected.score)
    assert {one["level"] for one in found} == {0, 1}  # both happen


def test_a_retired_class_no_longer_counts_for_its_group(tmp_path: Path) -> None:
    from model_store.maintenance.edit_classes import Care, rename_class, retire_class

    store = Store.create(str(tmp_path / "models"))
    promote(store, publish_tiny(store, tasks=TASKS, spread=0.3, hierarchy=GROUPS))
    care = Care(store=store, channel="production", actor="tests")
    retire_class("d", care=care)
    manifest = rename_class("c", "z", care=care).manifest
    assert manifest.hierarchy is not None
    assert manifest.hierarchy.above("z") == ("consonant",)
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        found = live.predict(*IMAGES, query="?top_k=4").json()["predictions"]
    for one in found:
        scores = {row["label"]: row["score"] for row in one["top"]}
        assert set(scores) == {"a", "b", "z"}
        if one["label"] == "consonant":
            assert np.isclose(one["score"], scores["b"] + scores["z"])
