"""Learning on top of a version in which classes were retired or renamed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from model_store.errors import DataRejected, WrongUsage
from model_store.maintenance.edit_classes import Care, rename_class, retire_class
from model_store.store.store import Store
from tests.trainer.folders import Listening, asked, labelled, write_classes
from trainer.add_task import add_task
from trainer.evaluation.evaluate import evaluate
from trainer.evaluation.judged import judged_by
from trainer.request import Evaluate


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Version 1 knows ant, bee, cow; version 2 has retired bee, version 3 calls cow bull."""
    data = write_classes(tmp_path / "animals", ["ant", "bee", "cow"])
    add_task(asked(tmp_path / "models", data), progress=Listening())
    store = Store.open(str(tmp_path / "models"))
    care = Care(store=store, channel="production", actor="tests")
    retire_class("bee", care=care)
    rename_class("cow", "bull", care=care)
    return store


def test_the_next_task_is_learnt_balanced_and_the_class_stays_retired(
    store: Store, tmp_path: Path
) -> None:
    listening = Listening()
    data = write_classes(tmp_path / "cars", ["bus", "van"])
    request = asked(tmp_path / "models", data, memory=8, loss="binary")
    outcome = add_task(request, progress=listening)
    manifest = outcome.manifest
    assert manifest.parent == 3
    assert manifest.retired == ("bee",)
    assert manifest.classes == ("ant", "bull", "bus", "van")
    assert "balancing" in listening.phases  # nobody misses exemplars of a retired class
    assert {one.class_name: one.count for one in manifest.memory} == dict.fromkeys(
        manifest.classes, 2
    )
    assert {one.class_name for one in manifest.held_out} == set(manifest.classes)
    assert "bee" not in manifest.metrics.per_class
    assert outcome.as_json()["classes"] == 4
    assert store.verify().ok


def test_a_retired_class_is_judged_by_nobody(store: Store, tmp_path: Path) -> None:
    request = Evaluate(store=store.location, data=tmp_path / "animals", channel="production")
    with pytest.raises(WrongUsage, match="holds 'bee', 'cow', which the model does not know"):
        evaluate(request, progress=Listening())
    (tmp_path / "animals" / "cow").rename(tmp_path / "animals" / "bull")
    (tmp_path / "animals" / "bee").rename(tmp_path / "elsewhere")
    report = evaluate(request, progress=Listening())
    assert report["per_class"].keys() == {"ant", "bull"}
    assert all("bee" not in taken_for for taken_for in report["confusion"].values())


def test_a_retired_class_never_wins() -> None:
    images = labelled([1, 1, 1])
    logits = np.tile(np.array([1, 9, 2], dtype=np.float32), (3, 1))
    judged = judged_by(logits, images, retired=["b"])
    assert judged.confusion() == {name: {"c": 1} for name in "abc"}


def test_the_name_of_a_retired_class_is_not_taught_by_accident(
    store: Store, tmp_path: Path
) -> None:
    data = write_classes(tmp_path / "more", ["bee", "van"])
    with pytest.raises(DataRejected, match="'bee' is the name of a class that was retired"):
        add_task(asked(tmp_path / "models", data), progress=Listening())
    assert store.newest() == 3
