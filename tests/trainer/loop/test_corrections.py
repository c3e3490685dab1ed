"""Kept images are moved to another class or taken out, and the next version is learnt so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from model_store.codec import load_network
from model_store.errors import CorrectionRefused, NothingToLearn, WrongUsage
from model_store.loop.corrections import (
    correct,
    find_corrections,
    image_named,
    kept_images,
    list_corrections,
)
from model_store.maintenance.edit_classes import Care, rename_class, retire_class
from model_store.maintenance.forget import forget_class
from model_store.records.manifest import Manifest, delta_of
from model_store.report.advice import read_advice
from model_store.store.store import Store
from tests.trainer.folders import Listening, asked, write_classes
from tests.trainer.loop.labelled import label_pictures
from tests.trainer.vit import made_up, write_vit
from trainer.add_task import add_task
from trainer.data import checks
from trainer.embeddings.statistics import accumulate, take_out
from trainer.loop.learn import FromInbox, learn_from_inbox
from trainer.request import AddTask, NetworkShape, PretrainedFile

CLASSES = ["a", "b", "c"]
WRONG = 3
"""Images of `a` in the folder of `b`."""


@pytest.fixture(scope="module", params=["pretrained", "scratch"])
def learnt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of 14 images, and three images of one of them in the folder of another."""
    folder = tmp_path_factory.mktemp("learnt")
    data = write_classes(folder / "letters", CLASSES, images=14)
    for number, file in enumerate(sorted((data / "a").iterdir())[:WRONG]):
        file.rename(data / "b" / f"wrong{number}.png")
    shutil.copy(sorted((data / "a").iterdir())[0], data / "c" / "twice.png")
    options: dict[str, object] = {"memory": 300}
    if request.param == "pretrained":
        vit = write_vit(folder / "vit.safetensors", made_up(image_size=8))
        options |= {
            "shape": NetworkShape(),
            "pretrained": PretrainedFile(file=vit, normalise="half"),
        }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "_FEW_DOUBLES", 1.0)  # as among many images
        add_task(asked(folder / "models", data, **options), progress=Listening())
    return folder


@pytest.fixture
def store(learnt: Path, tmp_path: Path) -> Store:
    shutil.copytree(learnt, tmp_path, dirs_exist_ok=True)
    return Store.open(str(tmp_path / "models"))


def head_of(store: Store) -> Manifest:
    head = store.head("production")
    assert head is not None
    return store.resolve(head)


def digests(store: Store, label: str, kind: str | None = None) -> list[str]:
    kept = kept_images(store, head_of(store), label)
    return [one.sha256 for one in kept if kind in (None, one.entry.shard.kind)]


def say(store: Store, image: str, label: str, to: str | None, **more: str) -> str:
    said = {"actor": "ann", "reason": "I have looked", **more}
    return correct(store, head_of(store), image=image, label=label, to=to, **said).id


def _care(store: Store) -> Care:
    return Care(store=store, channel="production", actor="x")


def learn(store: Store, **more: object) -> FromInbox:
    request = asked(Path(store.location), Path("inbox"), shape=NetworkShape(), memory=300, **more)
    assert isinstance(request, AddTask)
    return learn_from_inbox(request, progress=Listening())


def test_images_are_moved_and_taken_out_in_one_version(store: Store) -> None:
    before = head_of(store)
    moved, out = digests(store, "b", "memory")[:2]
    others = {name: set(digests(store, name)) for name in CLASSES}
    say(store, moved, "b", "a")
    say(store, out, "b", None)
    outcome = learn(store).last
    after = head_of(store)
    assert (outcome.promoted, after.corrected, after.parent) == (True, 2, before.version)
    assert sorted(after.extended) == ["a", "b"]
    assert after.new_classes == ()
    assert set(digests(store, "a")) == others["a"] | {moved}
    assert set(digests(store, "b")) == others["b"] - {moved, out}
    assert set(digests(store, "c")) == others["c"]
    assert not {"expert", "held-out"} & {ref.kind for ref in delta_of(after, before)}
    assert not store.verify().problems
    counts = {entry.class_name: entry.count for entry in after.statistics}
    if counts:  # with a pre-trained start
        known = {entry.class_name: entry.count for entry in before.statistics}
        assert counts == {"a": known["a"] + 1, "b": known["b"] - 2, "c": known["c"]}
    assert find_corrections(store, after).waiting == ()
    with pytest.raises(NothingToLearn):
        learn(store)


def test_an_image_to_judge_by_stays_one(store: Store) -> None:
    held = digests(store, "b", "held-out")[0]
    say(store, held, "b", "a")
    learn(store)
    assert held in digests(store, "a", "held-out")
    assert held not in digests(store, "b")


def test_the_newest_word_counts_and_it_can_be_taken_back(store: Store) -> None:
    image = digests(store, "b", "memory")[0]
    say(store, image, "b", "a")
    say(store, image, "b", "c", actor="bob")
    (move,) = find_corrections(store, head_of(store)).waiting
    assert (move.record.to, move.record.actor) == ("c", "bob")
    say(store, image, "b", "b")
    assert find_corrections(store, head_of(store)).waiting == ()
    assert [one.to for one in list_corrections(store)] == ["a", "c", "b"]  # nothing is rewritten


def test_there_and_back_again(store: Store) -> None:
    image = digests(store, "b", "memory")[0]
    say(store, image, "b", "a")
    learn(store)
    say(store, image, "a", "b")
    learn(store)
    assert image in digests(store, "b")
    assert find_corrections(store, head_of(store)).waiting == ()


def test_after_a_rollback_it_waits_again(store: Store) -> None:
    image = digests(store, "b", "memory")[0]
    say(store, image, "b", "a")
    learn(store)
    store.rollback(channel="production", to=1, actor="ann", reason="")
    assert len(find_corrections(store, head_of(store)).waiting) == 1


def test_corrections_come_before_labels_in_versions_of_their_own(store: Store) -> None:
    say(store, digests(store, "b", "memory")[0], "b", "a")
    label_pictures(Path(store.location), {"zebra": 6})
    outcomes = learn(store).outcomes
    assert [one.manifest.corrected for one in outcomes] == [1, 0]
    assert outcomes[1].manifest.new_classes == ("zebra",)
    assert outcomes[1].manifest.parent == outcomes[0].manifest.version


def test_an_image_that_was_learnt_twice_comes_once(store: Store) -> None:
    """The same photo was learnt under two classes: one correction is about both copies."""
    (image,) = set(digests(store, "a")) & set(digests(store, "c"))
    say(store, image, "c", "a")
    learn(store)
    assert digests(store, "a").count(image) == 1
    assert image not in digests(store, "c")
    say(store, image, "a", None)
    learn(store)
    assert not any(image in digests(store, name) for name in CLASSES)


@pytest.mark.parametrize(
    ("prepare", "label", "to", "says"),
    [
        (lambda store: None, "b", "zebra", "knows no class 'zebra'"),
        (lambda store: None, "zebra", "a", "knows no class 'zebra'"),
        (lambda store: None, "a", "b", "keeps no such image of 'a'"),
        (
            lambda store: retire_class("a", care=_care(store)),
            "b",
            "a",
            "class 'a' was retired",
        ),
        (
            lambda store: forget_class(store, "b", actor="x", reason=""),
            "b",
            "a",
            "keeps no such image of 'b'",
        ),
    ],
)
def test_what_cannot_be_corrected_is_said(
    store: Store, prepare: Callable[[Store], object], label: str, to: str, says: str
) -> None:
    image = digests(store, "b", "memory")[0]
    prepare(store)
    with pytest.raises(CorrectionRefused, match=says):
        say(store, image, label, to)


def test_the_last_image_of_a_class_stays(store: Store) -> None:
    for image in digests(store, "b", "memory"):
        say(store, image, "b", None)
    with pytest.raises(CorrectionRefused, match="the last image to learn from away from 'b'"):
        learn(store)
    assert store.versions() == [1]


def test_a_goal_that_is_retired_later_leaves_the_correction_with_the_reason(store: Store) -> None:
    say(store, digests(store, "b", "memory")[0], "b", "a")
    retire_class("a", care=_care(store))
    found = find_corrections(store, head_of(store))
    assert found.waiting == ()
    ((_, why),) = found.left
    assert "retired" in why


def test_forgetting_a_class_takes_its_corrections(store: Store) -> None:
    say(store, digests(store, "b", "memory")[0], "b", "a")
    say(store, digests(store, "c", "memory")[0], "c", None)
    forget_class(store, "b", actor="x", reason="asked for")
    assert [one.label for one in list_corrections(store)] == ["c"]


def test_a_renamed_class_keeps_its_images_correctable(store: Store) -> None:
    rename_class("b", "bee", care=_care(store))
    image = digests(store, "bee", "memory")[0]
    say(store, image, "bee", "a")
    learn(store)
    assert image in digests(store, "a")


def test_images_are_found_by_the_names_that_people_are_told(store: Store) -> None:
    manifest = head_of(store)
    images = list(kept_images(store, manifest, "b"))
    for kept in images:
        assert image_named(store, manifest, kept.name).sha256 == kept.sha256
    with pytest.raises(CorrectionRefused, match="keeps no exemplar 99 of 'b'"):
        image_named(store, manifest, "exemplar 99 of b")
    with pytest.raises(WrongUsage, match="names no kept image"):
        image_named(store, manifest, "b/003.png")


def test_advice_names_images_by_what_the_store_keeps(store: Store, learnt: Path) -> None:
    advice = read_advice(store, head_of(store))
    assert advice is not None
    if advice.notes:
        return  # from scratch nothing is said of single images
    assert advice.suspects
    for suspect in advice.suspects[:5]:
        assert suspect.image.kept in digests(store, suspect.class_name)


def test_an_image_taken_out_of_statistics_was_never_there() -> None:
    drawn = np.random.default_rng(0).normal(size=(12, 6))
    left = take_out(accumulate(drawn), drawn[8:])
    alone = accumulate(drawn[:8])
    assert left.count == alone.count
    np.testing.assert_allclose(left.mean_W, alone.mean_W, atol=1e-12)
    np.testing.assert_allclose(left.scatter_WW, alone.scatter_WW, atol=1e-9)
    single = take_out(accumulate(drawn[:2]), drawn[:1])
    np.testing.assert_allclose(single.mean_W, drawn[1], atol=1e-12)
    assert single.factor_RW.shape == (0, 6)


def test_the_corrected_classifier_is_another_one(store: Store) -> None:
    before = load_network(store.read_shard, head_of(store))
    for image in digests(store, "b", "memory")[:2]:
        say(store, image, "b", "a")
    learn(store)
    after = load_network(store.read_shard, head_of(store))
    assert _bytes(before.heads) != _bytes(after.heads)
    assert _bytes(before.experts) == _bytes(after.experts)


def _bytes(modules: torch.nn.ModuleList) -> bytes:
    return b"".join(one.detach().numpy().tobytes() for one in modules.parameters())
