from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_store.backends.base import Objects
from model_store.errors import DataRejected, ShardForgotten, ShardMissing, StoreError
from model_store.layout import forgotten_name, shard_name, version_name
from model_store.loop.inbox import Inbox, Judgement
from model_store.loop.jobs import Jobs
from model_store.maintenance.edit_classes import Care, rename_class
from model_store.maintenance.forget import drop_removed, forget_class
from model_store.maintenance.gc import collect_garbage
from model_store.records.manifest import ClassImages, Manifest
from model_store.records.tombstone import read_forgotten
from model_store.store.cache import runs_folder
from model_store.store.shard import shard_ref
from model_store.store.store import Store
from tests.model_store.backends import MemoryObjects, WatchedObjects
from tests.model_store.drafts import Prepared, image_shard, prepare
from tests.model_store.loop.items import add_item

WHO: dict[str, Any] = {"actor": "ann@host", "reason": "asked to"}


@pytest.fixture(params=["memory"])
def objects() -> Objects:
    return MemoryObjects()


def _with_held_out(prepared: Prepared, class_name: str) -> Prepared:
    data = image_shard([b"held out of " + class_name.encode()])
    ref = shard_ref("held-out", data)
    held_out = ClassImages(class_name=class_name, shard=ref, count=1)
    draft = prepared.draft.model_copy(update={"held_out": (*prepared.draft.held_out, held_out)})
    return Prepared(draft, {**prepared.shards, ref.sha256: data})


@pytest.fixture
def lineage(store: Store) -> list[Manifest]:
    """Classes 0a and 0b from version 1 on, 1a and 1b from version 2 on; 0a has held-out images."""
    first = _with_held_out(prepare(), "class-0a").publish(store)
    second = prepare(parent=first, seed=1)
    draft = second.draft.model_copy(update={"held_out": first.held_out})
    return [first, Prepared(draft, second.shards).publish(store)]


def _images(manifest: Manifest, class_name: str) -> set[str]:
    entries = (*manifest.memory, *manifest.held_out)
    return {one.shard.sha256 for one in entries if one.class_name == class_name}


def test_the_images_of_a_class_are_gone_from_every_version(
    store: Store, lineage: list[Manifest], watched: WatchedObjects
) -> None:
    digests = _images(lineage[1], "class-0a")
    assert len(digests) == 2
    kept = {shard_name(ref.sha256) for ref in lineage[1].shards if ref.sha256 not in digests}
    report = forget_class(store, "class-0a", **WHO)
    assert set(report.shards) == digests == store.forgotten()
    assert report.versions == (1, 2)
    assert report.bytes > 0
    assert report.other_classes == ()
    there = {entry.name for entry in watched.list("shards")}
    assert not {shard_name(sha256) for sha256 in digests} & there
    assert kept <= there


def test_verify_still_passes_and_the_tombstones_name_the_digests(
    store: Store, lineage: list[Manifest]
) -> None:
    report = forget_class(store, "class-0a", **WHO)
    for version in (None, 1, 2):
        assert store.verify(version).problems == ()
    for sha256 in report.shards:
        tombstone = read_forgotten(store.objects, sha256)
        assert tombstone is not None
        assert (tombstone.class_name, tombstone.reason) == ("class-0a", "asked to")
    assert store.manifest(2) == lineage[1]


def test_reading_what_was_forgotten_says_so(store: Store, lineage: list[Manifest]) -> None:
    forget_class(store, "class-0a", **WHO)
    ref = next(one.shard for one in lineage[0].memory if one.class_name == "class-0a")
    with pytest.raises(ShardForgotten, match="class-0a"):
        store.read_shard(ref)


def test_a_child_inherits_what_was_forgotten_and_is_published(
    store: Store, lineage: list[Manifest]
) -> None:
    forget_class(store, "class-0a", **WHO)
    assert prepare(parent=lineage[1], seed=2).publish(store).version == 3
    assert store.verify().problems == ()


def test_a_publish_of_the_same_images_does_not_bring_them_back(
    store: Store, lineage: list[Manifest], watched: WatchedObjects
) -> None:
    forget_class(store, "class-0a", **WHO)
    _with_held_out(prepare(), "class-0a").publish(store)
    there = {entry.name for entry in watched.list("shards")}
    assert not {shard_name(sha256) for sha256 in _images(lineage[0], "class-0a")} & there
    assert store.verify().problems == ()


@pytest.mark.usefixtures("lineage")
def test_a_version_that_comes_meanwhile_is_covered_too(
    store: Store, watched: WatchedObjects
) -> None:
    other = Store.open("models", objects=watched.objects)
    more = _with_held_out(prepare(parent=other.manifest(1), seed=3), "class-0b")

    def meanwhile(verb: str, name: str) -> None:
        if verb == "create" and name.startswith("forgotten/"):
            watched.before = lambda verb, name: None
            more.publish(other)

    watched.before = meanwhile
    report = forget_class(store, "class-0b", **WHO)
    assert report.versions == (1, 2, 3)
    assert len(report.shards) == 2
    assert store.verify().problems == ()


@pytest.mark.usefixtures("lineage")
def test_a_forget_that_was_stopped_is_noticed_and_brought_to_its_end_by_gc(
    store: Store, watched: WatchedObjects
) -> None:
    def stop(verb: str, name: str) -> None:
        if verb == "delete" and name.startswith("shards/"):
            raise KeyboardInterrupt

    watched.before = stop
    with pytest.raises(KeyboardInterrupt):
        forget_class(store, "class-0a", **WHO)
    watched.before = lambda verb, name: None
    (problem,) = store.verify().problems
    assert "was to be forgotten, and is there" in problem
    assert len(collect_garbage(store, dry_run=True).forgotten) == 1
    assert not store.verify().ok
    collect_garbage(store, dry_run=False)
    assert store.verify().problems == ()


@pytest.mark.usefixtures("lineage")
def test_forgetting_twice_finds_nothing_more_and_harms_nothing(store: Store) -> None:
    first = forget_class(store, "class-0a", **WHO)
    again = forget_class(store, "class-0a", **WHO)
    assert set(again.shards) == set(first.shards)
    assert again.bytes == 0
    assert store.verify().problems == ()


@pytest.mark.usefixtures("lineage")
def test_a_class_that_no_version_knows_is_refused(store: Store) -> None:
    with pytest.raises(DataRejected, match="no version knows"):
        forget_class(store, "class-0", **WHO)
    assert store.forgotten() == frozenset()


def test_a_class_without_images_has_nothing_to_forget(store: Store) -> None:
    prepare(images=0).publish(store)
    assert forget_class(store, "class-0a", **WHO).shards == ()


def test_a_tombstone_for_weights_excuses_nothing(
    store: Store, lineage: list[Manifest], watched: WatchedObjects
) -> None:
    expert = lineage[0].experts[0]
    forget_class(store, "class-0a", **WHO)
    image = next(iter(store.forgotten()))
    record = read_forgotten(store.objects, image)
    assert record is not None
    from model_store.records.sealing import create_record

    forged = record.model_copy(update={"sha256": expert.sha256})
    create_record(watched, forgotten_name(expert.sha256), forged)
    assert store.verify().problems == ()
    collect_garbage(store, dry_run=False)
    store.read_shard(expert)
    watched.delete(shard_name(expert.sha256))
    assert not store.verify().ok
    with pytest.raises(ShardMissing, match="missing"):
        store.read_shard(expert)


def test_the_same_images_under_another_class_are_named(store: Store) -> None:
    prepared = prepare()
    first, second = prepared.draft.memory
    shared = second.model_copy(update={"shard": first.shard})
    draft = prepared.draft.model_copy(update={"memory": (first, shared)})
    store.publish(draft, shards=prepared.shards)
    assert forget_class(store, "class-0a", **WHO).other_classes == ("class-0b",)


@pytest.mark.usefixtures("lineage")
def test_in_a_damaged_store_nothing_is_forgotten(store: Store, watched: WatchedObjects) -> None:
    watched.delete(version_name(1))
    watched.create(version_name(1), b"{}")
    with pytest.raises(StoreError, match="not known which shards are needed"):
        forget_class(store, "class-0a", **WHO)
    assert store.forgotten() == frozenset()


def _renamed(store: Store, old: str, new: str) -> Manifest:
    care = Care(store=store, channel="production", actor="tests")
    return rename_class(old, new, care=care).manifest


@pytest.mark.parametrize("name", ["class-0a", "bob"])
def test_a_class_is_forgotten_under_all_its_names(
    store: Store, lineage: list[Manifest], watched: WatchedObjects, name: str
) -> None:
    store.promote(lineage[1].version, channel="production", actor="tests", reason="")
    renamed = _renamed(store, "class-0a", "bob")
    inbox = Inbox(store.objects)
    labelled = add_item(inbox, "1", label="other")
    inbox.judge(labelled, Judgement.of_class("class-0a"), actor="tests")
    report = forget_class(store, name, **WHO)
    assert set(report.also_called) == {"class-0a", "bob"} - {name}
    assert report.versions == (1, 2, renamed.version)
    assert (report.other_classes, report.inbox_items) == ((), 1)
    digests = _images(lineage[0], "class-0a") | _images(renamed, "bob")
    there = {entry.name for entry in watched.list("shards")}
    assert not {shard_name(sha256) for sha256 in digests} & there


def test_images_that_only_the_old_name_has_are_forgotten_with_the_new_one(store: Store) -> None:
    first = _with_held_out(prepare(), "class-0a").publish(store)
    without = prepare(parent=first, seed=1)
    second = Prepared(
        without.draft.model_copy(
            update={"held_out": (), "memory": _but(without.draft.memory, "class-0a")}
        ),
        without.shards,
    ).publish(store)
    store.promote(second.version, channel="production", actor="tests", reason="")
    _renamed(store, "class-0a", "bob")
    report = forget_class(store, "bob", **WHO)
    assert set(report.shards) == _images(first, "class-0a")


def _but(entries: tuple[ClassImages, ...], name: str) -> tuple[ClassImages, ...]:
    return tuple(one for one in entries if one.class_name != name)


def test_jobs_whose_log_names_the_class_go_and_others_stay(
    store: Store, lineage: list[Manifest]
) -> None:
    jobs = Jobs(store.objects)
    for line in ("from the inbox, new: class-0a (40)", "from the inbox, new: class-0ab (40)"):
        jobs.ask(channel="production", actor="tests", reason="")
        claim = jobs.claim_next(channel="production", worker="tests")
        assert claim is not None
        claim.end("promoted", reason="", versions=(), log=[line])
    assert forget_class(store, "class-0a", **WHO).jobs == 1
    (left,) = jobs.states()
    assert jobs.job(left).end is not None
    folders = {name.split("/")[1] for name in store.objects.list_names("jobs")}
    assert folders == {left, "turns"}
    assert len(store.objects.list_names("jobs/turns")) == 1
    jobs.ask(channel="production", actor="tests", reason="")


def test_what_runs_on_the_store_have_kept_here_is_gone(
    store: Store, lineage: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path))
    ours = [
        runs_folder("tokens", store.location) / "one.tokens",
        runs_folder("checkpoints", store.location) / "data" / "one.safetensors",
        tmp_path / "tokens" / "of-older-software.tokens",
    ]
    theirs = runs_folder("tokens", "s3://another/store") / "one.tokens"
    for path in (*ours, theirs):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"tokens")
    assert forget_class(store, "class-0a", **WHO).cache_files == len(ours)
    assert [path.exists() for path in (*ours, theirs)] == [False, False, False, True]


def test_another_machine_drops_its_files_at_the_next_run(
    store: Store, lineage: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_class(store, "class-0a", **WHO)
    monkeypatch.setenv("DNE_CACHE", str(tmp_path))
    kept = runs_folder("tokens", store.location) / "one.tokens"
    kept.parent.mkdir(parents=True, mode=0o700)
    kept.write_bytes(b"tokens")
    assert drop_removed(store) == 1
    kept.write_bytes(b"tokens of a run that began after it")
    assert drop_removed(store) == 0
    assert kept.exists()
