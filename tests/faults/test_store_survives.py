"""What a kill, a full disk and a failing disk leave behind in a directory: a store that reads."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from model_store.errors import WriteFailed
from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.faults.disks import free_space, small_disk
from tests.faults.intact import check_intact
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


@pytest.mark.long
def test_a_kill_before_any_system_call_of_a_publish_leaves_whole_versions_only(
    memory_path: Path,
) -> None:
    stores = _after_every_kill(memory_path, "publish")
    assert len(stores) > 50
    published = 0
    for path in stores:
        store = Store.open(str(path))
        assert store.versions() in ([1], [1, 2])
        published += store.versions() == [1, 2]
        check_intact(store, head=1)
    assert 0 < published < len(stores)


def test_a_kill_before_any_system_call_of_a_rollback_leaves_the_channel_here_or_there(
    memory_path: Path,
) -> None:
    stores = _after_every_kill(memory_path, "rollback")
    lengths = {len(Store.open(str(path)).history("production")) for path in stores}
    assert lengths == {1, 2}
    for path in stores:
        check_intact(Store.open(str(path)), head=1)


def test_a_kill_while_a_store_is_made_does_not_stand_in_the_way_of_making_it(
    memory_path: Path,
) -> None:
    stores = _after_every_kill(memory_path, "create")
    assert len(stores) > 10
    for path in stores:
        store = Store.create(str(path / "fresh"))
        assert publish_lineage(store, 1)[0].version == 1
        assert store.verify().problems == ()


@pytest.fixture
def store(memory_path: Path) -> Store:
    store = Store.create(str(memory_path / "models"))
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


@dataclass(frozen=True, slots=True)
class Failed:
    """A publish in which one call failed: the store afterwards, and what the publisher heard."""

    store: Store
    error: WriteFailed | None


def _every_failure(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, call: str, code: int
) -> Iterator[Failed]:
    """One publish for each place at which `call` can fail, each to a fresh copy of the store."""
    prepared = prepare(parent=store.manifest(1), images=1, seed=1)
    for number in range(1, 1000):
        copy = shutil.copytree(store.location, f"{store.location}-{number}")
        failing = Failing(call, number=number, code=code)
        heard: WriteFailed | None = None
        with monkeypatch.context() as patched:
            patched.setattr(os, call, failing)
            try:
                prepared.publish(Store.open(copy))
            except WriteFailed as error:
                heard = error
        if failing.left > 0:
            return
        yield Failed(Store.open(copy), heard)


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
    for failed in _every_failure(store, monkeypatch, call=call, code=code):
        places += 1
        assert words in str(failed.error)
        assert "no version was published" in str(failed.error)
        assert failed.store.versions() == [1]
        assert list((Path(failed.store.location) / "tmp").iterdir()) == []
        check_intact(failed.store, head=1)
    assert places >= 3


def test_a_sync_that_fails_acknowledges_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    for failed in _every_failure(store, monkeypatch, call="fsync", code=errno.EIO):
        assert failed.error is None or "Input/output error" in str(failed.error)
        ends.append(type(failed.error).__name__)
        # Whoever hears nothing, or that it is unknown, may find the version; others may not.
        assert (failed.store.versions() == [1]) == (ends[-1] == "WriteFailed")
        check_intact(failed.store, head=1)
    # The manifest's name is synced last but one: what comes after it is only tidied up.
    assert ends.count("OutcomeUnknown") == 1
    assert ends.index("OutcomeUnknown") >= len(ends) - 2
    assert ends.count("NoneType") <= 1


def test_a_full_disk_leaves_the_channel_where_it_was(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write fails: room that is held back does not help."""
    publish_lineage(store, 1, channel=None)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fail)
        with pytest.raises(WriteFailed, match="No space left on device"):
            store.promote(2, channel="production", actor="a@b", reason="")
    check_intact(store, head=1)


def test_writes_that_take_only_a_few_bytes_are_continued(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, data: write(file, data[:100]))
        prepare(parent=store.manifest(1), seed=1).publish(store)
    check_intact(store, head=1)


def test_what_an_earlier_kill_left_in_tmp_is_harmless(store: Store) -> None:
    (Path(store.location) / "tmp" / "0123456789abcdef").write_bytes(b"half a shard")
    check_intact(store, head=1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", kib=256) as mounted:
        yield mounted


def test_a_disk_that_is_really_full_keeps_what_it_holds(disk: Path) -> None:
    store = Store.create(str(disk / "models"))
    publish_lineage(store, 1)
    free_space(disk, kib=0)
    with pytest.raises(WriteFailed, match="No space left on device; no version was published"):
        prepare(parent=store.manifest(1), images=1, seed=1).publish(store)
    assert store.versions() == [1]
    assert store.verify().ok
    (disk / "filler").unlink()
    check_intact(store, head=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_campaign_a_disk_that_is_full_at_every_size(tmp_path: Path, fault_row: AddRow) -> None:
    refused = 0
    for kib in range(0, 1024, 4):
        with small_disk(tmp_path / "disk", kib=1024) as disk:
            store = Store.create(str(disk / "models"))
            publish_lineage(store, 1)
            free_space(disk, kib=kib)
            try:
                prepare(parent=store.manifest(1), images=1, seed=1).publish(store)
            except WriteFailed as error:
                assert "No space left on device; no version was published" in str(error)  # noqa: PT017
                assert store.versions() == [1]
                refused += 1
                (disk / "filler").unlink()
                check_intact(store, head=1)
                continue
            assert store.versions() == [1, 2]
            assert store.verify().ok
            break
    assert refused >= 5
    fault_row(
        "disk full",
        f"tmpfs with 0, 4, 8, … KiB left, {refused + 1} sizes",
        f"{refused} refused with a clear error, head unchanged, nothing acknowledged; "
        "the first that was large enough held the version",
    )
