"""What a kill, a full disk and a failing disk leave behind in a directory: a store that reads."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from model_store.errors import OutcomeUnknown, WriteFailed
from model_store.store import Store
from tests.model_store.drafts import prepare, publish_lineage

pytestmark = pytest.mark.faults


def _after_every_kill(tmp_path: Path, kind: str) -> list[Path]:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults.killed_publisher", str(tmp_path), kind],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return sorted(path for path in tmp_path.iterdir() if path.name != "template")


def _check_intact(store: Store, *, head: int) -> None:
    """Whole versions only, the channel where it was, and the next publish works."""
    report = store.verify()
    assert report.problems == ()
    record = store.head("production")
    assert record is not None
    assert record.target == head
    store.resolve(record)
    newest = store.newest()
    assert newest is not None
    again = prepare(parent=store.manifest(1), task="again", images=1, seed=1).publish(store)
    assert again.version == newest + 1
    assert store.verify().problems == ()


def test_a_kill_before_any_system_call_of_a_publish_leaves_whole_versions_only(
    tmp_path: Path,
) -> None:
    stores = _after_every_kill(tmp_path, "publish")
    assert len(stores) > 50
    published = 0
    for path in stores:
        store = Store.open(str(path))
        assert store.versions() in ([1], [1, 2])
        published += store.versions() == [1, 2]
        _check_intact(store, head=1)
    assert 0 < published < len(stores)


def test_a_kill_before_any_system_call_of_a_rollback_leaves_the_channel_here_or_there(
    tmp_path: Path,
) -> None:
    stores = _after_every_kill(tmp_path, "rollback")
    lengths = {len(Store.open(str(path)).history("production")) for path in stores}
    assert lengths == {1, 2}
    for path in stores:
        _check_intact(Store.open(str(path)), head=1)


def test_a_kill_while_a_store_is_made_does_not_stand_in_the_way_of_making_it(
    tmp_path: Path,
) -> None:
    stores = _after_every_kill(tmp_path, "create")
    assert len(stores) > 10
    for path in stores:
        store = Store.create(str(path / "fresh"))
        assert publish_lineage(store, 1)[0].version == 1
        assert store.verify().problems == ()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(str(tmp_path / "models"))
    publish_lineage(store, 1)
    return store


class Failing:
    """The `number`-th call fails with `code`; the ones before it do their work."""

    def __init__(self, call: str, *, number: int, code: int) -> None:
        self.call = getattr(os, call)
        self.left = number
        self.code = code

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.left -= 1
        if self.left == 0:
            raise OSError(self.code, os.strerror(self.code))
        return self.call(*args, **kwargs)


def _publish_until_it_works(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, call: str, code: int
) -> Iterator[WriteFailed]:
    """One publish for each place at which `call` can fail."""
    prepared = prepare(parent=store.manifest(1), images=1, seed=1)
    for number in range(1, 1000):
        failing = Failing(call, number=number, code=code)
        with monkeypatch.context() as patched:
            patched.setattr(os, call, failing)
            fresh = Store.open(store.location)  # it does not know yet what is durable
            try:
                prepared.publish(fresh)
            except WriteFailed as error:
                caught = error
            else:
                assert failing.left > 0
                return
        yield caught


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        ("write", errno.ENOSPC, "No space left on device"),
        ("write", errno.EIO, "Input/output error"),
        ("mkdir", errno.ENOSPC, "No space left on device"),
        ("link", errno.ENOSPC, "No space left on device"),
        ("link", errno.EROFS, "Read-only file system"),
    ],
)
def test_a_full_or_failing_disk_publishes_nothing_and_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str, code: int, words: str
) -> None:
    places = 0
    for error in _publish_until_it_works(store, monkeypatch, call=call, code=code):
        places += 1
        assert words in str(error)
        assert "no version was published" in str(error)
        assert store.versions() == [1]
        assert store.verify().ok
        assert list((Path(store.location) / "tmp").iterdir()) == []
    assert places >= 3
    assert store.versions() == [1, 2]
    _check_intact(store, head=1)


def test_a_sync_that_fails_acknowledges_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = 0
    for error in _publish_until_it_works(store, monkeypatch, call="fsync", code=errno.EIO):
        assert "Input/output error" in str(error)
        unknown += isinstance(error, OutcomeUnknown)
        assert store.verify().ok
        # Only the last sync of all comes after the manifest has its name.
        assert store.versions() == [1] or isinstance(error, OutcomeUnknown)
    assert unknown > 0
    _check_intact(store, head=1)


def test_a_full_disk_leaves_the_channel_where_it_was(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_lineage(store, 1, channel=None)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", Failing("write", number=1, code=errno.ENOSPC))
        with pytest.raises(WriteFailed, match="No space left on device"):
            store.promote(2, channel="production", actor="a@b", reason="")
    _check_intact(store, head=1)


def test_writes_that_take_only_a_few_bytes_are_continued(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, data: write(file, data[:100]))
        prepare(parent=store.manifest(1), seed=1).publish(store)
    _check_intact(store, head=1)


def test_what_an_earlier_kill_left_in_tmp_is_harmless(store: Store) -> None:
    (Path(store.location) / "tmp" / "0123456789abcdef").write_bytes(b"half a shard")
    _check_intact(store, head=1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can only be mounted by root, and not in every container")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def _fill(disk: Path) -> None:
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        with suppress(OSError):  # that there is no space any more, which is what is wanted
            while os.write(filler, bytes(4096)):
                pass
    finally:
        os.close(filler)


def test_a_disk_that_is_really_full_keeps_what_it_holds(small_disk: Path) -> None:
    store = Store.create(str(small_disk / "models"))
    publish_lineage(store, 1)
    _fill(small_disk)
    with pytest.raises(WriteFailed, match="No space left on device; no version was published"):
        prepare(parent=store.manifest(1), images=1, seed=1).publish(store)
    assert store.versions() == [1]
    assert store.verify().ok
    (small_disk / "filler").unlink()
    _check_intact(store, head=1)
