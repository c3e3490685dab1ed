"""After a pre-trained start old classes are kept as statistics, with or without pictures."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from model_store.errors import WrongUsage
from model_store.maintenance.edit_classes import Care, retire_class
from model_store.maintenance.forget import forget_class
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.trainer.folders import Listening, asked, write_classes
from tests.trainer.start.pretrained_start import (
    LETTERS,
    first,
    later,
    network_of,
    run,
)
from trainer.data.folders import list_classes, read_images
from trainer.evaluation.judged import judge


@pytest.fixture
def bare(begun_without_pictures: Path, store: Path) -> Path:
    """A store whose version 1 knows the letters, and keeps no picture of them."""
    return Path(shutil.copytree(begun_without_pictures, store))


def accuracy(store: Path, manifest: Manifest, folder: Path) -> float | None:
    images = read_images(
        list_classes(folder),
        preprocessing=manifest.preprocessing,
        skip_bad=False,
        progress=Listening(),
    )
    network = network_of(store, manifest)
    judged = judge(
        network,
        images.among(manifest.spec.classes),
        preprocessing=manifest.preprocessing,
        retired=manifest.retired,
    )
    return judged.accuracy()


def counts(manifest: Manifest) -> dict[str, int]:
    return {entry.class_name: entry.count for entry in manifest.statistics}


def test_no_picture_is_in_the_store(bare: Path) -> None:
    store = Store.open(str(bare))
    manifest = store.manifest(1)
    assert manifest.image_shards == ()
    assert manifest.metrics.shown == ()
    assert {ref.kind for ref in manifest.shards} == {"expert", "classifier", "statistics"}
    assert len(list(store.objects.list("shards"))) == len(manifest.shards)
    assert counts(manifest) == {"a": 10, "b": 10, "c": 10}
    assert manifest.metrics.images == 6
    assert manifest.unknown is not None
    assert store.verify().ok


def test_old_classes_stay_known_without_a_picture_of_them(
    bare: Path, digits: Path, letters: Path
) -> None:
    progress = Listening()
    child = run(later(bare, digits, memory="statistics"), progress=progress).manifest
    assert child.image_shards == ()
    assert accuracy(bare, child, letters) == 1.0
    assert accuracy(bare, child, digits) == 1.0
    gate = child.metrics.gate
    assert gate is not None
    assert "old" in gate.not_judged
    assert child.metrics.accuracy.old is None
    assert any("keeps counts, means and scatters" in note for note in progress.notes)
    assert Store.open(str(bare)).verify().ok


def test_a_lineage_may_change_its_memory(bare: Path, digits: Path, tmp_path: Path) -> None:
    with_pictures = run(later(bare, digits)).manifest
    assert {entry.class_name for entry in with_pictures.memory} == {"0", "1"}
    assert set(counts(with_pictures)) == {*LETTERS, "0", "1"}
    signs = write_classes(tmp_path / "signs", ["+", "-"])
    again = run(later(bare, signs, memory="statistics")).manifest
    assert again.image_shards == ()
    assert set(counts(again)) == {*LETTERS, "0", "1", "+", "-"}
    assert accuracy(bare, again, digits) == 1.0


def test_pictures_make_the_same_statistics(begun: Path, bare: Path) -> None:
    kept = [Store.open(str(one)).manifest(1) for one in (begun, bare)]
    assert kept[0].statistics == kept[1].statistics
    assert kept[0].classifier == kept[1].classifier


@pytest.fixture
def begun(tmp_path: Path, letters: Path, vit: Path) -> Path:
    run(first(tmp_path / "begun", letters, vit))
    return tmp_path / "begun"


def test_an_extension_adds_to_the_statistics_of_a_class(
    bare: Path, tmp_path: Path, letters: Path
) -> None:
    more = write_classes(tmp_path / "more", ["b"], images=30, seed=5)
    child = run(later(bare, more, extend=True, memory="statistics")).manifest
    assert child.extended == ("b",)
    learnt = 30 - child.metrics.images  # the others are held out of this run
    assert counts(child) == {"a": 10, "b": 10 + learnt, "c": 10}
    before = Store.open(str(bare)).manifest(1)
    assert [one.shard for one in child.statistics][::2] == [one.shard for one in before.statistics][
        ::2
    ]
    assert accuracy(bare, child, letters) == 1.0


def test_a_forgotten_class_keeps_its_logit_and_loses_its_statistics(
    bare: Path, digits: Path, letters: Path
) -> None:
    store = Store.open(str(bare))
    forget_class(store, "b", actor="ann", reason="")
    child = run(later(bare, digits, memory="statistics", quick=True)).manifest
    assert set(counts(child)) == {"a", "c", "0", "1"}
    assert child.classes == ("a", "b", "c", "0", "1")
    found = accuracy(bare, child, letters)
    assert found is not None
    assert found > 0.9
    assert store.verify().ok


def test_a_retired_class_is_not_learnt_again(bare: Path, digits: Path) -> None:
    retire_class("b", care=Care(store=Store.open(str(bare)), channel="production", actor="ann"))
    child = run(later(bare, digits, memory="statistics")).manifest
    assert set(counts(child)) == {"a", "c", "0", "1"}
    assert accuracy(bare, child, digits) == 1.0


def test_without_a_pre_trained_start_pictures_are_needed(store: Path, letters: Path) -> None:
    with pytest.raises(WrongUsage, match="`memory=statistics` is for a model with a pre-trained"):
        run(asked(store, letters, memory="statistics"))
    assert not store.exists()
