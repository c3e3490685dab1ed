"""Stores that begin with the same pre-trained file hold the same expert, so they can share it."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_store.errors import AlternateRefused, WrongUsage
from model_store.store.store import Store, list_shards
from tests.trainer.command import Command
from tests.trainer.folders import write_classes
from tests.trainer.start.pretrained_start import first, later, run


def test_the_expert_of_a_file_is_the_same_in_every_store(
    tmp_path: Path, letters: Path, vit: Path
) -> None:
    """Whatever the classes are, their pictures, the seed, and how much the classifier reads."""
    other = write_classes(tmp_path / "other", ["kite", "leaf", "moon"], images=15, seed=8)
    begun = [
        run(first(tmp_path / f"models{number}", data, vit, **others))  # type: ignore[arg-type]
        for number, (data, others) in enumerate(
            [
                (letters, {"readout": "narrow"}),
                (other, {"readout": "wide", "seed": 5, "memory": "statistics", "name": "shapes"}),
            ]
        )
    ]
    experts = {outcome.manifest.experts[0] for outcome in begun}
    assert len(experts) == 1
    assert [outcome.manifest.spec.readout is None for outcome in begun] == [True, False]


def test_a_store_that_borrows_learns_its_tasks_without_a_backbone_of_its_own(
    tmp_path: Path, dne_train: Command, letters: Path, digits: Path, vit: Path
) -> None:
    shared, acme = tmp_path / "shared", Command(tmp_path / "acme", dne_train._capsys)
    run(first(shared, digits, vit))
    begin = ("add-task", "--data", letters, "--pretrained", vit, "--alternate", shared)
    assert acme(*begin, "--grow", "quick") == 0, acme.err
    assert acme("add-task", "--data", digits, "--grow", "quick", "--force") in (0, 3), acme.err
    store = Store.open(str(acme.store))
    expert = store.manifest(2).experts[0]
    assert expert == Store.open(str(shared)).manifest(1).experts[0]
    assert expert.sha256 not in list_shards(store)
    assert store.verify().problems == ()
    assert acme("evaluate", "--data", letters) == 0, acme.err
    assert acme("report", 2, "--out", tmp_path / "report") == 0, acme.err


def test_an_alternate_that_cannot_lend_is_refused_before_anything_is_learnt(
    tmp_path: Path, letters: Path, digits: Path, vit: Path
) -> None:
    store = tmp_path / "models"
    with pytest.raises(AlternateRefused, match="there is no store"):
        run(first(store, letters, vit, alternate=[str(tmp_path / "nothere")]))
    assert not store.exists()
    run(first(store, letters, vit))
    run(first(tmp_path / "shared", letters, vit))
    with pytest.raises(WrongUsage, match="is a store already"):
        run(later(store, digits, alternate=[str(tmp_path / "shared")]))
