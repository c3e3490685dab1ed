from __future__ import annotations

from typing import Any

import pytest

from model_store.backends.base import Objects
from model_store.errors import (
    NothingToRollBack,
    RecordInvalid,
    VersionDeleted,
    VersionNeeded,
    VersionNotFound,
)
from model_store.layout import deleted_name, record_name, version_name
from model_store.maintenance.forget import delete_version
from model_store.maintenance.gc import report_storage
from model_store.records.manifest import Manifest
from model_store.records.tombstone import read_deleted
from model_store.store.store import Store
from tests.model_store.backends import MemoryObjects, WatchedObjects
from tests.model_store.drafts import prepare, publish_lineage

WHO: dict[str, Any] = {"actor": "ann@host", "reason": "wrong data"}


@pytest.fixture(params=["memory"])
def objects() -> Objects:
    return MemoryObjects()


@pytest.fixture
def lineage(store: Store) -> list[Manifest]:
    """Versions 1, 2 and 3; the channel names 3."""
    return publish_lineage(store, 3)


def test_a_deleted_version_is_gone_and_its_tombstone_says_what_it_was(
    store: Store, lineage: list[Manifest]
) -> None:
    delete_version(store, 2, **WHO)
    assert store.versions() == [1, 3]
    with pytest.raises(VersionDeleted, match="version 2 was deleted"):
        store.manifest(2)
    tombstone = read_deleted(store.objects, 2)
    assert tombstone is not None
    assert tombstone.manifest_digest == lineage[1].digest
    assert (tombstone.parent, tombstone.parent_digest) == (1, lineage[0].digest)
    assert (tombstone.actor, tombstone.reason) == ("ann@host", "wrong data")


@pytest.mark.usefixtures("lineage")
def test_the_chain_holds_over_deleted_versions(store: Store) -> None:
    delete_version(store, 1, **WHO)
    delete_version(store, 2, **WHO)
    report = store.verify()
    assert report.problems == ()
    assert (report.versions, report.records) == (1, 3)
    assert store.verify(3).problems == ()


@pytest.mark.usefixtures("lineage")
def test_a_forged_tombstone_breaks_the_chain(store: Store, watched: WatchedObjects) -> None:
    watched.delete(version_name(2))
    forged = prepare(seed=9).publish(Store.create("other", objects=MemoryObjects()))
    other = Store.create("third", objects=MemoryObjects())
    publish_lineage(other, 1)
    second = prepare(parent=other.manifest(1), seed=8).publish(other)
    delete_version(other, second.version, **WHO)
    watched.create(deleted_name(2), other.objects.read(deleted_name(2), max_bytes=1 << 20))
    assert forged.version == 1
    problems = store.verify().problems
    assert any(problem.startswith(version_name(3)) for problem in problems)
    assert any(problem.startswith(record_name("production", 2)) for problem in problems)
    assert not store.verify(3).ok


@pytest.mark.usefixtures("lineage")
def test_the_number_of_a_deleted_version_is_not_taken_again(store: Store) -> None:
    store.rollback(channel="production", to=1, actor="a", reason="")
    delete_version(store, 3, **WHO)
    delete_version(store, 2, **WHO)
    assert store.newest() == 1
    assert prepare(parent=store.manifest(1), seed=7).publish(store).version == 4
    assert store.verify().problems == ()


@pytest.mark.usefixtures("lineage")
def test_a_number_that_is_taken_and_deleted_meanwhile_is_given_up(
    store: Store, watched: WatchedObjects
) -> None:
    other = Store.open("models", objects=watched.objects)

    def meanwhile(verb: str, name: str) -> None:
        """Between our listing and our manifest another version comes and goes."""
        if (verb, name) == ("create", version_name(4)):
            watched.before = lambda verb, name: None
            branch = prepare(parent=other.manifest(1), seed=5).publish(other)
            delete_version(other, branch.version, **WHO)

    watched.before = meanwhile
    assert prepare(parent=store.manifest(3), seed=6).publish(store).version == 5
    assert store.versions() == [1, 2, 3, 5]
    assert store.verify().problems == ()


@pytest.mark.usefixtures("lineage")
def test_what_a_channel_names_is_not_deleted(store: Store, watched: WatchedObjects) -> None:
    store.rollback(channel="production", to=2, actor="a", reason="")
    store.promote(1, channel="staging", actor="a", reason="")
    before = watched.objects.list("versions"), watched.objects.list("deleted")
    for version, channel in ((2, "production"), (1, "staging")):
        with pytest.raises(VersionNeeded, match=f"channel {channel} names"):
            delete_version(store, version, **WHO)
    assert (watched.objects.list("versions"), watched.objects.list("deleted")) == before
    delete_version(store, 3, **WHO)  # what a rollback left behind may go


@pytest.mark.usefixtures("lineage")
def test_what_a_training_run_builds_on_is_not_deleted(store: Store) -> None:
    store.announce("a" * 32, parent=2, digests=[])
    with pytest.raises(VersionNeeded, match="training run"):
        delete_version(store, 2, **WHO)
    store.withdraw("a" * 32)
    delete_version(store, 2, **WHO)


@pytest.mark.usefixtures("lineage")
@pytest.mark.parametrize("version", [0, 4, -1])
def test_what_is_not_there_cannot_be_deleted(store: Store, version: int) -> None:
    with pytest.raises(VersionNotFound):
        delete_version(store, version, **WHO)
    assert store.versions() == [1, 2, 3]


@pytest.mark.usefixtures("lineage")
def test_a_deletion_that_was_stopped_is_brought_to_its_end(
    store: Store, watched: WatchedObjects
) -> None:
    def stop(verb: str, name: str) -> None:
        if (verb, name) == ("delete", version_name(2)):
            raise KeyboardInterrupt

    watched.before = stop
    with pytest.raises(KeyboardInterrupt):
        delete_version(store, 2, **WHO)
    watched.before = lambda verb, name: None
    assert store.verify().problems == ()
    assert store.manifest(2).version == 2
    delete_version(store, 2, **WHO)
    assert store.versions() == [1, 3]
    assert store.verify().problems == ()


@pytest.mark.usefixtures("lineage")
def test_a_deletion_is_called_off_when_the_channel_moves_to_it(
    store: Store, watched: WatchedObjects
) -> None:
    other = Store.open("models", objects=watched.objects)

    def meanwhile(verb: str, name: str) -> None:
        if (verb, name) == ("create", deleted_name(2)):
            watched.before = lambda verb, name: None
            other.promote(2, channel="production", actor="b", reason="")

    watched.before = meanwhile
    with pytest.raises(VersionNeeded):
        delete_version(store, 2, **WHO)
    assert not store.is_deleted(2)
    assert store.manifest(2).version == 2


@pytest.mark.usefixtures("lineage")
def test_a_channel_that_moves_to_a_version_as_it_is_deleted_goes_back(
    store: Store, watched: WatchedObjects
) -> None:
    other = Store.open("models", objects=watched.objects)

    def meanwhile(verb: str, name: str) -> None:
        if (verb, name) == ("create", record_name("production", 4)):
            watched.before = lambda verb, name: None
            delete_version(other, 2, **WHO)

    watched.before = meanwhile
    with pytest.raises(VersionDeleted):
        store.promote(2, channel="production", actor="b", reason="")
    head = store.head("production")
    assert head is not None
    assert (head.number, head.target, head.mode) == (5, 3, "follow")
    assert store.verify().problems == ()


@pytest.mark.usefixtures("lineage")
def test_a_rollback_passes_over_deleted_versions(store: Store) -> None:
    delete_version(store, 2, **WHO)
    assert store.rollback(channel="production", to=None, actor="a", reason="").target == 1
    with pytest.raises(NothingToRollBack):
        store.rollback(channel="production", to=None, actor="a", reason="")
    with pytest.raises(VersionDeleted):
        store.rollback(channel="production", to=2, actor="a", reason="")


def test_a_child_of_a_version_that_was_deleted_meanwhile_is_published(
    store: Store, lineage: list[Manifest]
) -> None:
    prepared = prepare(parent=lineage[1], seed=5)
    delete_version(store, 2, **WHO)
    child = prepared.publish(store)
    assert (child.version, child.parent) == (4, 2)
    assert store.verify().problems == ()
    assert store.parent_of(child) == lineage[0]
    wrong = prepared.draft.model_copy(update={"parent_digest": "f" * 64})
    with pytest.raises(RecordInvalid):
        store.publish(wrong, shards=prepared.shards)


@pytest.mark.usefixtures("lineage")
def test_a_lost_manifest_is_no_deleted_version(store: Store, watched: WatchedObjects) -> None:
    prepare(parent=store.manifest(1), seed=4).publish(store)
    prepare(parent=store.manifest(1), seed=5).publish(store)
    watched.delete(version_name(4))
    assert store.verify().problems == ("there is no version 4; the newest is 5",)


def test_the_storage_report_says_what_a_deletion_would_free(
    store: Store, lineage: list[Manifest]
) -> None:
    report = report_storage(store)
    sizes = {ref.sha256: ref.bytes for one in lineage for ref in one.shards}
    assert report.stored == sum(sizes.values())
    assert (report.unnamed, report.condemned, report.deleted) == (0, 0, ())
    first, _, third = report.versions
    assert first.delta == first.total
    assert first.own == lineage[0].classifier.bytes
    assert third.total == sum({ref.sha256: ref.bytes for ref in lineage[2].shards}.values())
    assert third.total == third.shared + third.own
    delete_version(store, 2, **WHO)
    after = report_storage(store)
    assert after.deleted == (2,)
    assert after.unnamed == lineage[1].classifier.bytes
    assert after.stored == report.stored
