"""Advice stands beside its version, and with no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_store.errors import RecordInvalid
from model_store.layout import advice_name
from model_store.maintenance.forget import forget_class
from model_store.records.manifest import Manifest
from model_store.report.advice import (
    MOST_LINES,
    Advice,
    AdvisedImage,
    ClassAdvice,
    Confused,
    Copy,
    Suspect,
    drop_advice_on,
    lines,
    read_advice,
    write_advice,
)
from model_store.store.store import Store
from tests.trained_store import TrainedStore

IMAGE = AdvisedImage(name="mug/1.jpg")
FULL = Advice(
    classes=tuple(
        ClassAdvice(class_name=name, images=30, accuracy=0.8, more=15, gain=gain)
        for name, gain in (("mug", 0.041), ("cup", 0.03), ("jar", 0.02), ("pot", 0.01))
    ),
    confused=(Confused(class_name="mug", taken_for="cup", count=3, images=(IMAGE,)),),
    suspects=(Suspect(image=IMAGE, class_name="mug", likelier="cup", score=0.1),),
    suspects_in_all=7,
    copies=(Copy(judged=IMAGE, learnt=AdvisedImage(name="x"), class_name="mug", bits=2),),
    copies_in_all=1,
)


@pytest.fixture
def store(trained_copy: TrainedStore) -> Store:
    return Store.open(str(trained_copy.pretrained))


@pytest.fixture
def manifest(store: Store) -> Manifest:
    store.objects.delete(advice_name(2))
    return store.manifest(2)


def test_advice_of_the_trainer_is_there(trained_store: TrainedStore) -> None:
    store = Store.open(str(trained_store.pretrained))
    for version in trained_store.pretrained_versions:
        assert read_advice(store, store.manifest(version)) is not None


def test_the_first_advice_stays(store: Store, manifest: Manifest) -> None:
    write_advice(store, manifest, FULL)
    write_advice(store, manifest, Advice())
    assert read_advice(store, manifest) == FULL


def test_a_version_that_took_over_a_number_has_no_advice_of_another(
    store: Store, manifest: Manifest
) -> None:
    write_advice(store, manifest, FULL)
    assert read_advice(store, manifest.model_copy(update={"digest": "0" * 64})) is None


def test_advice_on_a_forgotten_class_does_not_come_back(store: Store, manifest: Manifest) -> None:
    forget_class(store, manifest.classes[0], actor="tests", reason="asked for")
    write_advice(store, manifest, FULL)
    assert read_advice(store, manifest) is None


def test_advice_on_a_deleted_version_is_not_kept(store: Store, manifest: Manifest) -> None:
    Path(store.location, "versions", "00000002.json").unlink()
    write_advice(store, manifest, FULL)
    assert not Path(store.location, advice_name(2)).exists()


def test_only_versions_that_know_a_class_lose_their_advice(
    store: Store, manifest: Manifest
) -> None:
    write_advice(store, manifest, FULL)
    drop_advice_on(store, [store.manifest(1), manifest], manifest.tasks[1].classes[0])
    assert read_advice(store, manifest) is None
    assert read_advice(store, store.manifest(1)) is not None


def test_damaged_advice_is_refused(store: Store, manifest: Manifest) -> None:
    write_advice(store, manifest, FULL)
    path = Path(store.location, advice_name(2))
    written = path.read_bytes().replace(b"mug/1.jpg", b"mug/2.jpg")
    path.chmod(0o600)
    path.write_bytes(written)
    with pytest.raises(RecordInvalid):
        read_advice(store, manifest)


def test_the_most_helpful_things_are_said_in_five_lines() -> None:
    told = [line.text for line in lines(FULL)]
    assert told == [
        "7 images look more like another class than like their own. Look first at mug/1.jpg: it "
        "is labelled mug and looks like cup.",
        "1 image to judge by is nearly a copy of images to learn from, so the accuracy looks "
        "better than it is: mug/1.jpg and x.",
        "About 15 more images of mug: + 4 points.",
        "About 15 more images of cup: + 3 points.",
        "mug is confused with cup (3 images): look at mug/1.jpg.",
    ]
    assert len(told) == MOST_LINES


def test_classes_that_gain_nothing_are_told_so() -> None:
    one = ClassAdvice(class_name="mug", images=30, accuracy=1.0, more=15, gain=0.0)
    (line,) = lines(Advice(classes=(one,)))
    assert line.text == "No class gains a point from 15 more images."
