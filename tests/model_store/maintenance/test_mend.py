"""A channel with something in its way: what moves say, what `mend-channel` does, what it leaves."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from model_store.cli.main import main
from model_store.errors import ChannelBroken, RecordInvalid, StoreError
from model_store.layout import mended_name, record_name
from model_store.maintenance.mend import Mender, mend_channel
from model_store.records.channel import ChannelRecord
from model_store.records.gc_marks import SWEEP_WINDOW_S
from model_store.records.sealing import seal, seal_record
from model_store.store.store import Store
from tests.model_store.backends import ClockedObjects, WatchedObjects
from tests.model_store.commands import Capture, json_of
from tests.model_store.drafts import publish_lineage, record

FAR = 99_999_999
MOVE: dict[str, Any] = {"channel": "production", "actor": "a@b", "reason": ""}
MENDER = Mender(actor="a@b", reason="somebody planted it")


def sound(store: Store, number: int, *, target: int = 1) -> bytes:
    """A record that fits its name and its target, whatever came before it."""
    made = record(number, target, channel="production")
    return seal_record(made.model_copy(update={"target_digest": store.manifest(target).digest}))


JUNK = {
    "nothing": b"",
    "no JSON": b"\x00\xff junk",
    "an empty object": b"{}",
    "no digest": b'{"format":1}',
    "a string for a format": seal({"format": "1"}),
    "another number": seal_record(record(5, 1, channel="production")),
    "another channel": seal_record(record(FAR, 1, channel="staging")),
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_what_is_no_record_and_comes_after_a_gap_is_set_aside(store: Store, junk: bytes) -> None:
    publish_lineage(store, 3)
    store.objects.create(record_name("production", FAR), junk)
    for move in (
        lambda: store.promote(1, **MOVE),
        lambda: store.rollback(to=2, **MOVE),
        lambda: store.rollback(to=None, **MOVE),
    ):
        with pytest.raises(ChannelBroken, match="mend-channel --channel production"):
            move()
    report = mend_channel(store, "production", mender=MENDER, dry_run=False)
    assert [one.number for one in report.aside] == [FAR]
    assert (report.head and report.head.number, report.left) == (3, ())
    assert store.record_numbers("production") == [1, 2, 3]
    assert store.verify().ok
    kept = json.loads(store.objects.read(mended_name("production", FAR, 1), max_bytes=1 << 20))
    assert base64.b64decode(kept["content"]) == junk
    assert (kept["actor"], kept["reason"]) == ("a@b", "somebody planted it")
    assert store.rollback(to=None, **MOVE).number == 4


def test_a_dry_run_changes_nothing(store: Store, watched: WatchedObjects) -> None:
    publish_lineage(store, 2)
    store.objects.create(record_name("production", 9), b"junk")
    watched.calls.clear()
    report = mend_channel(store, "production", mender=MENDER, dry_run=True)
    assert [one.number for one in report.aside] == [9]
    assert not watched.names("create")
    assert not watched.names("delete")


def test_a_sound_record_after_a_gap_stays_unless_it_is_asked_for(store: Store) -> None:
    """It may be what is left of a history whose middle was lost."""
    publish_lineage(store, 2)
    store.objects.create(record_name("production", 5), sound(store, 5))
    store.objects.create(record_name("production", 4), b"junk")
    report = mend_channel(store, "production", mender=MENDER, dry_run=False)
    assert [one.number for one in report.aside] == [4]
    assert [one.number for one in report.left] == [5]
    assert (report.head and report.head.number) == 5
    head = store.head("production")
    assert head is not None
    assert head.number == 5
    assert store.promote(2, **MOVE).number == 6, "and the channel goes on after it"
    mend_channel(store, "production", mender=MENDER, dry_run=False, also_valid=True)
    assert store.record_numbers("production") == [1, 2]


def test_a_sound_record_that_none_can_follow_is_told_and_set_aside_when_asked(
    store: Store,
) -> None:
    publish_lineage(store, 2)
    store.objects.create(record_name("production", FAR), sound(store, FAR))
    with pytest.raises(ChannelBroken, match="no record can follow it"):
        store.promote(2, **MOVE)
    assert not mend_channel(store, "production", mender=MENDER, dry_run=False).aside
    mend_channel(store, "production", mender=MENDER, dry_run=False, also_valid=True)
    assert store.promote(2, **MOVE).number == 3


def test_a_record_of_a_later_format_is_left_alone(store: Store) -> None:
    publish_lineage(store, 1)
    store.objects.create(record_name("production", 7), seal({"format": 2}))
    report = mend_channel(store, "production", mender=MENDER, dry_run=False, also_valid=True)
    assert (report.aside, [one.number for one in report.left]) == ((), [7])
    assert store.record_numbers("production") == [1, 7]


def test_a_damaged_record_in_the_chain_is_not_touched(store: Store) -> None:
    publish_lineage(store, 3)
    for number in (2, 3):
        store.objects.delete(record_name("production", number))
        store.objects.create(record_name("production", number), b"torn")
    report = mend_channel(store, "production", mender=MENDER, dry_run=False, also_valid=True)
    assert (report.aside, report.left) == ((), ())
    with pytest.raises(RecordInvalid, match="00000003"):
        store.head("production")
    assert store.rollback(to=1, **MOVE).number == 4


def test_a_backend_that_cannot_read_is_no_reason_to_delete(
    store: Store, watched: WatchedObjects
) -> None:
    publish_lineage(store, 1)
    store.objects.create(record_name("production", 7), b"junk")

    def fail(verb: str, name: str) -> None:
        if verb == "read" and name == record_name("production", 7):
            raise StoreError(f"{name} could not be read: Input/output error")

    watched.before = fail
    with pytest.raises(StoreError, match="Input/output error"):
        mend_channel(store, "production", mender=MENDER, dry_run=False)
    watched.before = lambda verb, name: None
    assert store.record_numbers("production") == [1, 7]


# Several at a time


def test_two_who_mend_at_once_never_delete_a_record_that_came_meanwhile() -> None:
    """The second one has seen the junk; the first takes it away, and its number is taken by a
    true record before the second goes on."""
    watched = WatchedObjects(ClockedObjects())
    store = Store.create("models", objects=watched)
    publish_lineage(store, 1)
    store.objects.create(record_name("production", 3), b"junk")
    rival = Store.open("models", objects=watched.objects)

    def overtake(verb: str, name: str) -> None:
        if (verb, name) == ("create", mended_name("production", 3, 1)):
            watched.before = lambda verb, name: None
            mend_channel(rival, "production", mender=MENDER, dry_run=False)
            for _ in range(2):
                rival.promote(1, **MOVE)

    watched.before = overtake
    with pytest.raises(StoreError, match="is being set aside, or was a moment ago"):
        mend_channel(store, "production", mender=MENDER, dry_run=False)
    assert [one.number for one in store.history("production")] == [1, 2, 3]


def test_whoever_died_in_between_does_not_stop_the_next_one_for_long() -> None:
    objects = ClockedObjects()
    watched = WatchedObjects(objects)
    store = Store.create("models", objects=watched)
    publish_lineage(store, 1)
    store.objects.create(record_name("production", 3), b"junk")

    def die(verb: str, name: str) -> None:
        if (verb, name) == ("delete", record_name("production", 3)):
            raise KeyboardInterrupt

    watched.before = die
    with pytest.raises(KeyboardInterrupt):
        mend_channel(store, "production", mender=MENDER, dry_run=False)
    watched.before = lambda verb, name: None
    with pytest.raises(StoreError, match="try again in 10 minutes"):
        mend_channel(store, "production", mender=MENDER, dry_run=False)
    objects.now_s += SWEEP_WINDOW_S + 1
    assert mend_channel(store, "production", mender=MENDER, dry_run=False).aside
    assert store.record_numbers("production") == [1]


def test_whoever_was_held_up_deletes_nothing(store: Store) -> None:
    publish_lineage(store, 1)
    store.objects.create(record_name("production", 3), b"junk")
    times = iter((0.0, SWEEP_WINDOW_S))
    slow = Mender(actor="a", reason="", monotonic_s=lambda: next(times))
    with pytest.raises(StoreError, match="took too long"):
        mend_channel(store, "production", mender=slow, dry_run=False)
    assert store.record_numbers("production") == [1, 3]


# The command


@pytest.fixture
def blocked(location: str) -> Store:
    store = Store.open(location)
    publish_lineage(store, 3)
    (Path(location) / record_name("production", FAR)).write_bytes(b"junk")
    return store


@pytest.mark.parametrize("move", [["promote", "2"], ["rollback"], ["rollback", "--to", "1"]])
def test_a_move_that_is_blocked_names_the_command_that_mends(
    blocked: Store, move: list[str], capsys: Capture
) -> None:
    assert main([*move, "--store", blocked.location]) == 1
    told = capsys.readouterr().err
    assert "channels/production/99999999.json cannot be trusted: records before it are" in told
    assert "`dne-store mend-channel --channel production`" in told


def test_mend_channel_says_what_it_would_do_and_does_it_when_told(
    blocked: Store, capsys: Capture
) -> None:
    assert main(["mend-channel", "--store", blocked.location]) == 0
    out = capsys.readouterr().out
    assert "would be set aside: channels/production/99999999.json (it is not JSON" in out
    assert "channel production would name version 3 (record 3)" in out
    assert "nothing was changed; --yes does it" in out
    assert blocked.record_numbers("production")[-1] == FAR
    found = json_of(capsys, "mend-channel", "--yes", "--store", blocked.location)
    assert (found["target"], found["number"], found["left"]) == (3, 3, [])
    assert [one["number"] for one in found["set_aside"]] == [FAR]
    assert main(["rollback", "--store", blocked.location]) == 0
    capsys.readouterr()
    assert main(["mend-channel", "--yes", "--store", blocked.location]) == 0
    assert "has no gap: nothing stands in its way" in capsys.readouterr().out


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_what_is_not_even_a_file_is_set_aside(
    blocked: Store, planted: str, capsys: Capture
) -> None:
    path = Path(blocked.location) / record_name("production", FAR)
    path.unlink()
    if planted == "link":
        path.symlink_to(Path(blocked.location) / record_name("production", 1))
    else:
        os.mkfifo(path)
    assert json_of(capsys, "mend-channel", "--yes", "--store", blocked.location)["number"] == 3
    assert blocked.record_numbers("production") == [1, 2, 3]


def test_verify_names_it_without_looking_for_millions_of_records(
    blocked: Store, capsys: Capture
) -> None:
    assert main(["verify", "--store", blocked.location, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["problems"]) == 2
    gap, junk = found["problems"]
    assert "channels/production/00000004.json is missing, and so are those up to" in gap
    assert "mend-channel" in gap
    assert "channels/production/99999999.json cannot be trusted" in junk


def test_a_damaged_record_in_the_chain_is_told_apart(location: str, capsys: Capture) -> None:
    store = Store.open(location)
    publish_lineage(store, 2)
    (Path(location) / record_name("production", 2)).write_bytes(b"torn")
    assert main(["mend-channel", "--yes", "--store", location]) == 0
    out = capsys.readouterr().out
    assert "channels/production/00000002.json cannot be read; `dne-store promote N`" in out
    assert isinstance(store.promote(1, **MOVE), ChannelRecord)


def test_a_channel_without_a_record_is_not_called_sound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_lineage(Store.create(str(tmp_path)), 1)
    assert main(["mend-channel", "--channel", "produktion", "--store", str(tmp_path)]) == 0
    assert "channel produktion has no record" in capsys.readouterr().out
