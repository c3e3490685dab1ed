"""What a version is said to have done, and what the gate said of it."""

from __future__ import annotations

from model_store.maintenance.edit_classes import Care, rename_class, retire_class
from model_store.records.describe import NAMED, change, summary
from model_store.records.manifest import Manifest
from model_store.records.quality import Gate
from model_store.store.store import Store
from tests.model_store.drafts import prepare


def changed(store: Store, manifest: Manifest) -> str:
    return change(manifest, store.parent_of(manifest))


def judged(manifest: Manifest, gate: Gate | None) -> Manifest:
    metrics = manifest.metrics.model_copy(update={"gate": gate})
    return manifest.model_copy(update={"metrics": metrics})


def test_a_version_that_learnt_a_task_names_it_and_its_classes(store: Store) -> None:
    names = [f"kind-{i:02d}" for i in range(NAMED + 2)]
    first = prepare(task="many", classes=names).publish(store)
    second = prepare(parent=first, task="cars", classes=["bus", "van"]).publish(store)
    assert changed(store, first) == f"learnt many: {', '.join(names[:NAMED])} and 2 more"
    assert changed(store, second) == "learnt cars: bus, van"


def test_versions_by_manifest_only_say_what_they_changed(store: Store) -> None:
    prepare(task="pets", classes=["cat", "dog"]).publish(store)
    store.promote(1, channel="production", actor="tests", reason="")
    care = Care(store=store, channel="production", actor="tests")
    renamed = rename_class("cat", "kitty", care=care).manifest
    retired = retire_class("dog", care=care).manifest
    assert changed(store, renamed) == "renamed cat to kitty"
    assert changed(store, retired) == "retired dog"
    assert change(retired, None) == "changed version 2, which cannot be read any more"


def test_an_extension_names_the_classes_that_got_images(store: Store) -> None:
    first = prepare(task="pets", classes=["cat", "dog"]).publish(store)
    extending = first.model_copy(update={"extended": ("cat",), "parent": 1, "version": 2})
    assert change(extending, first) == "extended cat with more images"
    again = first.model_copy(update={"parent": 1, "version": 2})
    assert change(again, first) == "tuned the classifier again"


def test_a_row_has_the_verdict_in_a_word_in_a_line_and_in_sentences(store: Store) -> None:
    manifest = prepare().publish(store)
    refusal = Gate(passed=False, reasons=("it fell", "it is slow"))
    row = summary(judged(manifest, refusal), parent=None)
    assert row["gate"] == "refused"
    assert row["verdict"] == "refused: it fell; it is slow"
    assert row["reasons"] == ["it fell", "it is slow"]
    for gate, word in (
        (None, "not judged"),
        (Gate(passed=True), "passed"),
        (refusal.model_copy(update={"forced": True}), "overruled"),
    ):
        assert summary(judged(manifest, gate), parent=None)["gate"] == word
