"""Statistics of a class are kept, checked, handed on and forgotten as its images are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from model_store.backends.base import Objects
from model_store.errors import ShardCorrupt, ShardForgotten
from model_store.layout import shard_name, version_name
from model_store.maintenance.copy import copy_store
from model_store.maintenance.edit_classes import Care, rename_class, retire_class
from model_store.maintenance.forget import forget_class
from model_store.maintenance.gc import collect_garbage, report_storage
from model_store.records.manifest import ClassTokens, Draft, Manifest
from model_store.store.shard import shard_ref
from model_store.store.store import Store
from tests.model_store.backends import MemoryObjects
from tests.model_store.drafts import Prepared, prepare, with_statistics

WHO: dict[str, Any] = {"actor": "ann@host", "reason": "asked to"}


@pytest.fixture(params=["memory"])
def objects() -> Objects:
    return MemoryObjects()


@pytest.fixture
def lineage(store: Store) -> list[Manifest]:
    """Classes 0a and 0b from version 1 on, 1a and 1b from version 2 on; 2 is promoted."""
    first = with_statistics(prepare()).publish(store)
    second = with_statistics(prepare(parent=first, seed=1)).publish(store)
    store.promote(2, channel="production", actor="a@b", reason="")
    return [first, second]


def of_class(manifest: Manifest, name: str) -> ClassTokens:
    return next(entry for entry in manifest.statistics if entry.class_name == name)


def care(store: Store) -> Care:
    return Care(store=store, channel="production", actor="tests")


def test_a_version_hands_on_the_statistics_of_older_classes(
    store: Store, lineage: list[Manifest]
) -> None:
    names = [entry.class_name for entry in lineage[1].statistics]
    assert names == ["class-0a", "class-0b", "class-1a", "class-1b"]
    assert lineage[1].statistics[:2] == lineage[0].statistics
    assert store.verify().ok
    assert not set(lineage[1].model_shards) & {one.shard for one in lineage[1].statistics}


def test_a_manifest_without_statistics_does_not_name_them(store: Store) -> None:
    prepare().publish(store)
    assert "statistics" not in json.loads(store.objects.read(version_name(1), max_bytes=1 << 20))


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_statistics_of_another_number_of_images_are_refused(store: Store, count: int) -> None:
    """Three images leave a factor of two rows."""
    prepared = with_statistics(prepare())
    entries = tuple(one.model_copy(update={"count": count}) for one in prepared.draft.statistics)
    draft = prepared.draft.model_copy(update={"statistics": entries})
    with pytest.raises(ShardCorrupt, match="instead of F32"):
        Prepared(draft, prepared.shards).publish(store)
    assert store.versions() == []


def test_verify_names_statistics_that_are_damaged_or_lost(
    store: Store, lineage: list[Manifest]
) -> None:
    ref = of_class(lineage[0], "class-0a").shard
    data = store.objects.read(shard_name(ref.sha256), max_bytes=ref.bytes)
    store.objects.delete(shard_name(ref.sha256))
    assert any("statistics of version 1" in one for one in store.verify().problems)
    store.objects.create(shard_name(ref.sha256), data[:-1] + b"\x00")
    assert any("statistics of version 1" in one for one in store.verify().problems)


@pytest.mark.parametrize(
    "update",
    [
        {"class_name": "nobody"},
        {"class_name": "class-0b"},
        {"shard": shard_ref("memory", b"x")},
        {"count": 0},
    ],
)
def test_a_manifest_with_wrong_statistics_is_refused(update: dict[str, object]) -> None:
    draft = with_statistics(prepare()).draft
    first, *others = draft.statistics
    entries = [first.model_copy(update=update), *others]
    body = draft.model_dump(mode="json", by_alias=True)
    body["statistics"] = [one.model_dump(mode="json", by_alias=True) for one in entries]
    with pytest.raises(ValidationError):
        Draft.model_validate(body)


def test_forgetting_a_class_takes_its_statistics_and_no_others(
    store: Store, lineage: list[Manifest]
) -> None:
    gone = of_class(lineage[0], "class-0a").shard
    report = forget_class(store, "class-0a", **WHO)
    assert gone.sha256 in report.shards
    assert report.other_classes == ()
    assert store.verify().ok
    with pytest.raises(ShardForgotten):
        store.read_shard(gone)
    for name in ("class-0b", "class-1a", "class-1b"):
        store.read_shard(of_class(lineage[1], name).shard)


def test_what_was_forgotten_does_not_come_back_with_a_version(
    store: Store, lineage: list[Manifest]
) -> None:
    gone = of_class(lineage[0], "class-0a").shard
    data = store.read_shard(gone)
    forget_class(store, "class-0a", **WHO)
    again = with_statistics(prepare(parent=lineage[1], seed=2))
    Prepared(again.draft, {**again.shards, gone.sha256: data}).publish(store)
    assert store.verify().ok
    with pytest.raises(ShardForgotten):
        store.read_shard(gone)


def test_a_retired_class_hands_on_no_statistics_and_a_renamed_one_does(
    store: Store, lineage: list[Manifest]
) -> None:
    retire_class("class-0b", care=care(store))
    child = rename_class("class-0a", "first", care=care(store)).manifest
    assert [one.class_name for one in child.statistics] == ["first", "class-1a", "class-1b"]
    assert child.statistics[0].shard == lineage[0].statistics[0].shard
    assert store.verify().ok


def test_housekeeping_keeps_statistics_that_a_version_names(
    store: Store, lineage: list[Manifest]
) -> None:
    loose = b"x"
    store.objects.create(shard_name(shard_ref("statistics", loose).sha256), loose)
    report = collect_garbage(store, dry_run=False)
    assert [entry.name for entry in report.condemned] == [
        shard_name(shard_ref("statistics", loose).sha256)
    ]


def test_statistics_are_copied_and_counted(store: Store, lineage: list[Manifest]) -> None:
    other = Store.create("other", objects=MemoryObjects())
    copy_store(store, other)
    assert other.verify().ok
    assert other.read_shard(of_class(lineage[1], "class-1a").shard)
    counted = report_storage(store).versions[1]
    assert counted.total == sum(ref.bytes for ref in set(lineage[1].shards))
    assert counted.images == sum(ref.bytes for ref in lineage[1].image_shards)
