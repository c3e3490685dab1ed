"""Move channels: promote, roll back and resume, alone and beside others."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from model_store.backends.local import LocalDirectory
from model_store.errors import (
    ChannelMoved,
    ChannelNotFound,
    NothingToRollBack,
    RecordInvalid,
    VersionNotFound,
    WriteFailed,
    WrongUsage,
)
from model_store.layout import record_name, version_name
from model_store.store.store import Store
from tests.model_store.backends import WatchedObjects
from tests.model_store.drafts import prepare, publish_lineage

MOVE: dict[str, Any] = {"actor": "ann@host", "reason": "because"}


def test_a_channel_names_what_was_promoted_last(store: Store) -> None:
    publish_lineage(store, 2)
    head = store.head("production")
    assert head is not None
    assert (head.target, head.mode, head.number) == (2, "follow", 2)
    assert store.channels() == ["production"]
    assert store.head("empty") is None


def test_the_head_costs_one_listing_and_one_read(store: Store, watched: WatchedObjects) -> None:
    publish_lineage(store, 2)
    for _ in range(20):
        store.promote(1, channel="production", **MOVE)
    watched.calls.clear()
    store.head("production")
    assert [verb for verb, _ in watched.calls] == ["list", "read"]


def test_rollback_moves_no_shards(store: Store, watched: WatchedObjects) -> None:
    publish_lineage(store, 3)
    watched.calls.clear()
    store.rollback(channel="production", to=1, **MOVE)
    assert watched.names("create") == [record_name("production", 4)]
    assert watched.names("delete") == []
    assert not any(name.startswith("shards/") for _, name in watched.calls)


def test_rollback_is_recorded_with_who_when_and_why(store: Store) -> None:
    publish_lineage(store, 2)
    record = store.rollback(channel="production", to=None, **MOVE)
    assert store.history("production")[-1] == record
    assert (record.target, record.mode) == (1, "pin")
    assert (record.actor, record.reason) == ("ann@host", "because")
    assert record.time.endswith("Z")


def test_rolling_back_twice_goes_two_back_and_resume_undoes_both(store: Store) -> None:
    publish_lineage(store, 3)
    assert store.rollback(channel="production", to=None, **MOVE).target == 2
    assert store.rollback(channel="production", to=None, **MOVE).target == 1
    with pytest.raises(NothingToRollBack):
        store.rollback(channel="production", to=None, **MOVE)
    resumed = store.resume(channel="production", **MOVE)
    assert (resumed.target, resumed.mode) == (3, "follow")


def test_a_rollback_stays_when_versions_are_published(store: Store) -> None:
    first, second = publish_lineage(store, 2)
    store.rollback(channel="production", to=first.version, **MOVE)
    prepare(parent=second, seed=7).publish(store)
    head = store.head("production")
    assert head is not None
    assert (head.target, head.mode) == (1, "pin")


def test_a_version_that_does_not_exist_moves_no_channel(store: Store) -> None:
    publish_lineage(store, 2)
    with pytest.raises(VersionNotFound):
        store.rollback(channel="production", to=9, **MOVE)
    with pytest.raises(VersionNotFound):
        store.promote(9, channel="production", **MOVE)
    assert len(store.history("production")) == 2


def test_a_channel_that_names_nothing_cannot_go_back_or_on(store: Store) -> None:
    publish_lineage(store, 1)
    with pytest.raises(ChannelNotFound, match="staging names no version yet"):
        store.rollback(channel="staging", to=1, **MOVE)
    with pytest.raises(ChannelNotFound):
        store.resume(channel="staging", **MOVE)
    assert store.channels() == ["production"]


def test_a_channel_that_moved_on_is_not_promoted_over(store: Store) -> None:
    publish_lineage(store, 3)
    store.rollback(channel="production", to=1, **MOVE)
    for after in (0, 3, 5):
        with pytest.raises(ChannelMoved, match="version 2 was not promoted"):
            store.promote(2, channel="production", after=after, **MOVE)
    assert store.promote(2, channel="production", after=4, **MOVE).number == 5
    assert store.promote(2, channel="fresh", after=0, **MOVE).number == 1


def _overtaking(watched: WatchedObjects, number: int, *, target: int) -> None:
    """Somebody else writes record `number` just before we do."""
    rival = Store.open("models", objects=watched.objects)

    def overtake(verb: str, name: str) -> None:
        if (verb, name) == ("create", record_name("production", number)):
            watched.before = lambda verb, name: None
            rival.promote(target, channel="production", actor="rival", reason="")

    watched.before = overtake


def test_two_who_promote_at_once_do_not_overwrite_each_other(
    store: Store, watched: WatchedObjects
) -> None:
    publish_lineage(store, 3)
    _overtaking(watched, 4, target=1)
    with pytest.raises(ChannelMoved):
        store.promote(2, channel="production", after=3, **MOVE)
    assert store.promote(2, channel="production", **MOVE).number == 5


def test_a_rollback_that_was_overtaken_chooses_its_target_again(
    store: Store, watched: WatchedObjects
) -> None:
    publish_lineage(store, 3)
    _overtaking(watched, 4, target=1)
    record = store.rollback(channel="production", to=None, **MOVE)
    assert (record.number, record.target) == (5, 3)


def test_a_rollback_that_was_overtaken_while_it_chose_chooses_again(
    store: Store, watched: WatchedObjects
) -> None:
    publish_lineage(store, 3)
    rival = Store.open("models", objects=watched.objects)

    def overtake(verb: str, name: str) -> None:
        if (verb, name) == ("read", record_name("production", 3)):
            watched.before = lambda verb, name: None
            rival.promote(1, channel="production", actor="rival", reason="")

    watched.before = overtake
    record = store.rollback(channel="production", to=None, **MOVE)
    assert (record.number, record.target) == (5, 3)


def test_a_record_whose_version_was_exchanged_is_not_resolved(
    store: Store, watched: WatchedObjects
) -> None:
    publish_lineage(store, 1)
    head = store.head("production")
    assert head is not None
    assert store.resolve(head).version == 1
    watched.objects.delete(version_name(1))
    prepare(task="other", seed=3).publish(store)
    with pytest.raises(RecordInvalid, match="another version 1"):
        store.resolve(head)


def test_a_damaged_history_does_not_stop_a_rollback_to_a_named_version(
    store: Store, watched: WatchedObjects
) -> None:
    publish_lineage(store, 2)
    watched.objects.delete(record_name("production", 2))
    watched.objects.create(record_name("production", 2), b"garbage")
    with pytest.raises(RecordInvalid):
        store.head("production")
    store.rollback(channel="production", to=1, **MOVE)
    head = store.head("production")
    assert head is not None
    assert head.target == 1


@pytest.mark.parametrize("reason", ["x" * 2001, "\ud800"])
def test_a_reason_that_cannot_be_kept_is_wrong_usage(store: Store, reason: str) -> None:
    publish_lineage(store, 1)
    with pytest.raises(WrongUsage):
        store.promote(1, channel="production", actor="a", reason=reason)


@pytest.mark.parametrize("channel", ["../versions", "", "a/b", "production\n"])
def test_a_hostile_channel_name_is_wrong_usage(store: Store, channel: str) -> None:
    publish_lineage(store, 1)
    with pytest.raises(WrongUsage):
        store.head(channel)
    with pytest.raises(WrongUsage):
        store.promote(1, channel=channel, **MOVE)


class FilledDisk(LocalDirectory):
    """A disk that collecting has filled: there is room for nothing but what the reserve holds."""

    is_full = False

    def create(self, name: str, data: bytes) -> bool:
        if self.is_full and self.list_names("reserve"):
            error = OSError(errno.ENOSPC, "No space left on device")
            raise WriteFailed(f"{name} could not be written: {error.strerror}") from error
        return super().create(name, data)


def test_channels_move_on_a_full_disk(tmp_path: Path) -> None:
    disk = FilledDisk(tmp_path / "models")
    store = Store.create(str(tmp_path / "models"), objects=disk)
    publish_lineage(store, 3)
    disk.is_full = True
    assert store.rollback(channel="production", to=None, **MOVE).target == 2
    assert store.resume(channel="production", **MOVE).target == 3
    assert store.promote(1, channel="production", **MOVE).target == 1
    assert disk.list_names("reserve"), "it is held back again"
