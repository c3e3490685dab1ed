"""Housekeeping on a disk that has no room left: it must be able to begin."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from model_store.backends.local import LocalDirectory
from model_store.cli.main import main
from model_store.errors import WriteFailed
from model_store.maintenance.gc import collect_garbage
from model_store.store.reserve import RESERVE_BYTES, RESERVE_NAME
from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.faults.disks import free_space, make_ext4, mounted, small_disk
from tests.model_store.drafts import prepare, publish_lineage

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", kib=2048) as mounted:
        yield mounted


def _filled(disk: Path, *, images: int = 2) -> Store:
    """A store of three versions, the third of which no channel names, on a disk without room."""
    store = Store.create(str(disk / "models"))
    publish_lineage(store, 2)
    prepare(parent=store.manifest(2), images=images, seed=7).publish(store)
    _fill(disk)
    return store


def _fill(disk: Path) -> None:
    """Leave nothing, not even what a file system keeps for root."""
    free_space(disk, kib=0)
    with (disk / "filler").open("ab", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            os.fsync(file.fileno())


def _free(disk: Path) -> int:
    left = os.statvfs(disk)
    return left.f_bfree * left.f_bsize


def _run(capsys: Capture, store: Store, *arguments: str) -> dict[str, object]:
    code = main([*arguments, "--store", store.location, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    return found


def _clean_up(capsys: Capture, store: Store) -> None:
    """What an operator does: delete a version, condemn what it leaves, sweep it."""
    _run(capsys, store, "delete", "3")
    assert _run(capsys, store, "gc", "--sweep", "--grace", "0")["condemned"]
    assert _run(capsys, store, "gc", "--sweep", "--grace", "0")["deleted"]


def test_delete_and_gc_free_room_on_a_disk_that_is_really_full(disk: Path, capsys: Capture) -> None:
    store = _filled(disk)
    shards = set(store.objects.list_names("shards"))
    _clean_up(capsys, store)
    assert store.versions() == [1, 2]
    assert len(shards - set(store.objects.list_names("shards"))) == 4
    assert store.verify().ok
    assert store.objects.list_names("reserve") == (RESERVE_NAME,), "it is held back again"
    assert not store.objects.list_names("condemned")


def test_without_the_reserve_the_command_says_what_would_help(disk: Path, capsys: Capture) -> None:
    store = _filled(disk)
    store.objects.delete(RESERVE_NAME)
    _fill(disk)
    assert main(["delete", "3", "--store", store.location]) == 1
    told = capsys.readouterr().err
    assert "No space left on device" in told
    assert "remove a file of some KiB" in told
    assert store.versions() == [1, 2, 3]
    assert store.verify().ok


def test_marks_for_which_there_is_no_room_wait_for_the_next_run(
    disk: Path, capsys: Capture
) -> None:
    store = _filled(disk)
    _run(capsys, store, "delete", "3")
    true_create = LocalDirectory.create
    marks: list[str] = []

    def scarce(self: LocalDirectory, name: str, data: bytes) -> bool:
        if name.startswith("condemned/") and len(marks) == 2:
            raise WriteFailed(f"{name} could not be written") from OSError(errno.ENOSPC, "full")
        made = true_create(self, name, data)
        marks.extend([name] if name.startswith("condemned/") else [])
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalDirectory, "create", scarce)
        report = collect_garbage(store, dry_run=False, grace_s=0)
    assert (len(report.condemned), len(report.unmarked)) == (2, 2)
    assert min(one.bytes for one in report.condemned) >= max(one.bytes for one in report.unmarked)
    assert len(_run(capsys, store, "gc", "--sweep", "--grace", "0")["deleted"]) == 2  # type: ignore[arg-type]
    assert len(_run(capsys, store, "gc", "--sweep", "--grace", "0")["deleted"]) == 2  # type: ignore[arg-type]
    assert store.verify().ok


@pytest.mark.parametrize("command", [["forget", "--class", "class-0a"], ["mend-channel", "--yes"]])
def test_what_else_takes_away_finds_room_too(
    disk: Path, command: list[str], capsys: Capture
) -> None:
    store = Store.create(str(disk / "models"))
    publish_lineage(store, 2)
    (disk / "models/channels/production/00000009.json").write_bytes(b"junk")
    if command[0] == "forget":
        (disk / "models/channels/production/00000009.json").unlink()
    free_space(disk, kib=0)
    _run(capsys, store, *command)
    assert store.verify().ok


def test_a_store_that_borrows_uses_the_reserve_of_its_alternate(
    disk: Path, capsys: Capture
) -> None:
    shared = Store.create(str(disk / "shared"))
    publish_lineage(shared, 1)
    acme = Store.create(str(disk / "models"), alternates=[shared.location])
    publish_lineage(acme, 2)
    assert acme.objects.list_names("reserve") == ()
    _fill(disk)
    _run(capsys, acme, "rollback", "--to", "1", "--reason", "x" * 2000)
    _run(capsys, acme, "forget", "--class", "class-0a")
    assert acme.verify().ok
    assert shared.verify().ok
    (disk / "filler").unlink()
    _run(capsys, acme, "gc")
    held = [store.objects.list_names("reserve") for store in (shared, acme)]
    assert (RESERVE_NAME,) in held


def test_a_store_from_before_gets_its_reserve(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "models"))
    publish_lineage(store, 1)
    path = tmp_path / "models" / RESERVE_NAME
    assert path.stat().st_size == RESERVE_BYTES
    path.unlink()
    Store.open(store.location)
    assert not path.exists(), "who only reads writes nothing"
    collect_garbage(store, dry_run=False)
    assert path.exists()
    path.unlink()
    Store.create(store.location)
    assert path.exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_campaign_housekeeping_on_full_disks(
    tmp_path: Path, capsys: Capture, fault_row: AddRow
) -> None:
    freed: dict[str, int] = {}
    for kib in (0, 4, 16, 64):
        with small_disk(tmp_path / "disk", kib=4096) as disk:
            store = _filled(disk, images=40)
            free_space(disk, kib=kib)
            _clean_up(capsys, store)
            assert store.verify().ok
            freed[f"tmpfs {kib} KiB left"] = _free(disk) >> 10
    image = tmp_path / "ext4"
    make_ext4(image, mib=16)
    with mounted(tmp_path / "ext4-disk", options="loop", kind="ext4", source=image) as disk:
        store = _filled(disk)
        _clean_up(capsys, store)
        assert store.verify().ok
        freed["ext4 full"] = _free(disk) >> 10
    fault_row(
        "housekeeping, disk full",
        "delete, gc --sweep twice; " + ", ".join(freed),
        "each came to its end, the store verified; KiB free afterwards: "
        + ", ".join(map(str, freed.values())),
    )
