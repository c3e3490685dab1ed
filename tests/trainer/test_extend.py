from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from model_store.codec import load_network
from model_store.errors import DataRejected, Interrupted, WrongUsage
from model_store.maintenance.edit_classes import Care, rename_class
from model_store.records.manifest import ClassImages, Manifest, delta_of
from model_store.store.shard import decode_images
from model_store.store.store import Store
from tests.trainer.folders import SHAPE, Listening, asked, pixels_of, write_classes
from trainer.add_task import add_task
from trainer.request import Effort, NetworkShape
from trainer.versions.outcome import Outcome


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks: letters a and b, digits 0 and 1. To be copied."""
    folder = tmp_path_factory.mktemp("learnt")
    for name, classes in (("letters", ["a", "b"]), ("digits", ["0", "1"])):
        data = write_classes(folder / name, classes)
        shape = SHAPE if name == "letters" else NetworkShape()
        add_task(asked(folder / "models", data, shape=shape), progress=Listening())
    return folder


@pytest.fixture
def store(learnt: Path, tmp_path: Path) -> Path:
    shutil.copytree(learnt, tmp_path, dirs_exist_ok=True)
    return tmp_path / "models"


def more_of(folder: Path, class_name: str, *, images: int = 12, seed: int = 9) -> Path:
    (folder / class_name).mkdir(parents=True)
    for index, pixels in enumerate(pixels_of(class_name, images, seed=seed)):
        Image.fromarray(pixels).save(folder / class_name / f"{index:03}.png")
    return folder


def extend(
    store: Path, data: Path, *, progress: Listening | None = None, **more: object
) -> Outcome:
    options: dict[str, object] = {"shape": NetworkShape(), "effort": Effort(epochs=2), **more}
    request = asked(store, data, extend=True, **options)
    return add_task(request, progress=progress or Listening())


def images_of(store: Path, entries: tuple[ClassImages, ...], class_name: str) -> list[bytes]:
    read = Store.open(str(store)).read_shard
    (entry,) = [one for one in entries if one.class_name == class_name]
    return decode_images(read(entry.shard), count=entry.count)


def parent_of(store: Path) -> Manifest:
    return Store.open(str(store)).manifest(2)


def test_an_extension_keeps_places_and_experts_and_changes_the_classifier(
    store: Path, tmp_path: Path
) -> None:
    outcome = extend(store, more_of(tmp_path / "more", "b"))
    parent, child = parent_of(store), outcome.manifest
    assert (child.version, child.parent) == (3, 2)
    assert child.spec == parent.spec
    assert child.tasks == parent.tasks
    assert [ref.kind for ref in delta_of(child, parent)] == ["classifier"]
    assert child.extended == ("b",)
    assert outcome.as_json()["extended"] == ["b"]
    assert outcome.as_json()["new_classes"] == []
    head = Store.open(str(store)).head("production")
    assert head is not None
    assert (head.target, head.reason) == (3, "more images of b")
    assert not Store.open(str(store)).verify().problems


def test_an_extended_version_loads_and_the_next_task_builds_on_it(
    store: Path, tmp_path: Path
) -> None:
    extend(store, more_of(tmp_path / "more", "b"))
    signs = write_classes(tmp_path / "signs", ["+"])
    manifest = add_task(asked(store, signs, shape=NetworkShape()), progress=Listening()).manifest
    assert manifest.spec.classes == ("a", "b", "0", "1", "+")
    assert manifest.extended == ()
    assert load_network(Store.open(str(store)).read_shard, manifest).spec == manifest.spec


def test_what_is_kept_of_an_extended_class_is_chosen_from_old_and_new(
    store: Path, tmp_path: Path
) -> None:
    child = extend(store, more_of(tmp_path / "more", "b")).manifest
    parent = parent_of(store)
    for kind in ("memory", "held_out"):
        before, after = getattr(parent, kind), getattr(child, kind)
        assert [one.class_name for one in after] == [one.class_name for one in before]
        kept, was = images_of(store, after, "b"), images_of(store, before, "b")
        assert set(kept) > set(was)
        untouched = [one for one in after if one.class_name != "b"]
        assert untouched == [one for one in before if one.class_name != "b"]
    held_out = set(images_of(store, child.held_out, "b"))
    assert not held_out & set(images_of(store, child.memory, "b"))


def test_images_that_were_held_out_are_never_learnt_by_way_of_an_extension(
    store: Path, tmp_path: Path
) -> None:
    progress = Listening()
    everything = more_of(tmp_path / "letters-and-more", "b", images=14, seed=3)
    for path in (tmp_path / "letters" / "b").iterdir():
        (everything / "b" / f"old-{path.name}").write_bytes(path.read_bytes())
    child = extend(store, everything, progress=progress).manifest
    assert any("12 images left out" in note for note in progress.notes)
    held_out = set(images_of(store, parent_of(store).held_out, "b"))
    assert not held_out & set(images_of(store, child.memory, "b"))
    with pytest.raises(DataRejected, match="given all of these images already"):
        extend(store, write_classes(tmp_path / "same", ["a"]))


def test_an_extension_teaches_what_the_new_images_show(store: Path, tmp_path: Path) -> None:
    """Images of b that look different now: as those of a class z would."""
    strange = tmp_path / "strange" / "b"
    strange.mkdir(parents=True)
    for index, pixels in enumerate(pixels_of("z", 30, seed=5)):
        Image.fromarray(pixels).save(strange / f"{index:03}.png")
    effort = Effort(epochs=60, learning_rate=0.01)
    metrics = extend(store, strange.parent, effort=effort, augment="none").manifest.metrics
    assert metrics.accuracy.new is not None
    assert metrics.accuracy.parent_old is not None
    assert metrics.accuracy.old is not None
    assert metrics.accuracy.old == metrics.accuracy.all  # every class was there before
    assert metrics.accuracy.old > metrics.accuracy.parent_old
    assert metrics.accuracy.new >= 0.8


def test_one_image_is_enough_to_extend_and_is_not_held_out(store: Path, tmp_path: Path) -> None:
    child = extend(store, more_of(tmp_path / "one", "a", images=1)).manifest
    assert len(images_of(store, child.memory, "a")) == 11
    assert child.held_out == parent_of(store).held_out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "again"}, "`name` and `heads` do not fit"),
        ({"shape": NetworkShape(heads=2)}, "`heads`"),
    ],
)
def test_what_an_extension_cannot_have_is_wrong_usage(
    store: Path, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(WrongUsage, match=sentence):
        extend(store, more_of(tmp_path / "more", "b"), **options)


def test_an_extension_refuses_new_classes_and_an_empty_store(store: Path, tmp_path: Path) -> None:
    with pytest.raises(DataRejected, match="does not know 'z'"):
        extend(store, more_of(more_of(tmp_path / "more", "b"), "z"))
    with pytest.raises(WrongUsage, match="needs a version to extend"):
        extend(tmp_path / "empty", more_of(tmp_path / "first", "b"))


def test_the_phases_of_an_extension_are_expected_with_all_their_images(
    store: Path, tmp_path: Path
) -> None:
    progress = Listening()
    extend(store, more_of(tmp_path / "more", "b"), progress=progress)
    assert progress.expected[0].name == "extending"
    assert {one.name: one.images for one in progress.expected}.items() <= progress.totals.items()


def test_without_images_of_all_classes_nothing_is_extended(tmp_path: Path) -> None:
    location = tmp_path / "models"
    data = write_classes(tmp_path / "letters", ["a", "b"])
    add_task(asked(location, data, memory=0), progress=Listening())
    with pytest.raises(DataRejected, match="keeps no images of 'a'"):
        extend(location, more_of(tmp_path / "more", "b"), memory=0)
    assert Store.open(str(location)).versions() == [1]


def test_an_interrupted_extension_goes_on_to_the_same_bits(store: Path, tmp_path: Path) -> None:
    data = more_of(tmp_path / "more", "b")
    kept: dict[str, Any] = {
        "checkpoint": tmp_path / "kept",
        "effort": Effort(epochs=6, batch_size=64),
    }
    with pytest.raises(Interrupted, match="goes on after epoch 1 of extending"):
        extend(store, data, progress=Listening(interrupt_in="extending", after=2), **kept)
    continued = extend(store, data, **kept).manifest
    Store.open(str(store)).rollback(channel="production", to=2, actor="tests", reason="")
    whole = extend(store, data, effort=kept["effort"]).manifest
    assert continued.classifier == whole.classifier
    assert continued.classifier != parent_of(store).classifier


def test_a_rename_after_an_extension_extends_nothing(store: Path, tmp_path: Path) -> None:
    extend(store, more_of(tmp_path / "more", "b"))
    care = Care(store=Store.open(str(store)), channel="production", actor="tests")
    renamed = rename_class("b", "bee", care=care).manifest
    assert renamed.spec.classes == ("a", "bee", "0", "1")
    assert renamed.extended == ()
