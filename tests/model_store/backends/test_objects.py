from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from model_store.backends.base import ObjectMissing, ObjectRefused, Objects
from model_store.backends.local import LocalDirectory
from model_store.backends.location import objects_at
from model_store.errors import StoreError, StoreUnsupported, WriteFailed, WrongUsage

HOSTILE_NAMES = [
    "",
    "/etc/passwd",
    "..",
    "../up",
    "shards/../../up",
    "shards//x",
    "shards/./x",
    "shards/x\0y",
    "shards/x\n",
    "shards/%2e%2e/x",
    "shards\\x",
    ".hidden",
    "a/b/c/d/e",
    "x" * 129,
    "x" * 4096,
    "Ünicode",
]


def test_what_was_created_is_read_back(objects: Objects) -> None:
    assert objects.create("a/b/c.json", b"hello")
    assert objects.read("a/b/c.json", max_bytes=5) == b"hello"


def test_an_empty_object_is_an_object(objects: Objects) -> None:
    assert objects.create("a", b"")
    assert objects.read("a", max_bytes=0) == b""


def test_the_first_to_create_wins_and_is_never_overwritten(objects: Objects) -> None:
    assert objects.create("a/b", b"first")
    assert not objects.create("a/b", b"second")
    assert objects.read("a/b", max_bytes=10) == b"first"


def test_what_is_missing_is_said_to_be_missing(objects: Objects) -> None:
    with pytest.raises(ObjectMissing):
        objects.read("a/b", max_bytes=10)


def test_no_more_is_read_than_asked_for(objects: Objects) -> None:
    objects.create("a", b"12345")
    with pytest.raises(ObjectRefused):
        objects.read("a", max_bytes=4)


def test_a_listing_holds_all_objects_below_a_folder_and_no_others(objects: Objects) -> None:
    for name in ("a/one", "a/b/two", "ab/three", "four"):
        objects.create(name, name.encode())
    assert sorted((entry.name, entry.bytes) for entry in objects.list("a")) == [
        ("a/b/two", 7),
        ("a/one", 5),
    ]
    assert list(objects.list("nothing")) == []


def test_a_deleted_object_is_gone_and_deleting_it_again_is_no_error(objects: Objects) -> None:
    objects.create("a/b", b"")
    objects.delete("a/b")
    objects.delete("a/b")
    objects.delete("no/where")
    assert list(objects.list("a")) == []


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_are_refused_by_every_verb(
    objects: Objects, name: str, tmp_path: Path
) -> None:
    objects.create("a", b"")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ObjectRefused):
        objects.create(name, b"evil")
    with pytest.raises(ObjectRefused):
        objects.read(name, max_bytes=10)
    with pytest.raises(ObjectRefused):
        objects.list(name)
    with pytest.raises(ObjectRefused):
        objects.delete(name)
    assert sorted(tmp_path.rglob("*")) == before


def test_of_many_who_create_at_once_exactly_one_wins(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "models")
    start = threading.Barrier(8)
    won: list[int] = []

    def create(number: int) -> None:
        start.wait()
        if directory.create("a/b", bytes([number]) * 1000):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert directory.read("a/b", max_bytes=1000) == bytes(won) * 1000


def test_nothing_is_left_in_tmp(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path)
    directory.create("a", b"1")
    directory.create("a", b"2")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_write_is_synced_before_it_is_named_and_its_folders_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, link = os.fsync, os.link

    def watched_fsync(file: int) -> None:
        events.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{file}')).name}")
        fsync(file)

    def watched_link(*args: Any, **kwargs: Any) -> None:
        events.append("link")
        link(*args, **kwargs)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "link", watched_link)
    LocalDirectory(tmp_path / "up" / "models").create("shards/ab/x", b"data")
    linked = events.index("link")
    before, after = events[:linked], events[linked + 1 :]
    # Each folder that was made is synced into the one that holds it, the object's own one last.
    assert before[:2] == [f"fsync {tmp_path.name}", "fsync up"]
    assert {"fsync models", "fsync shards"} <= set(before)
    assert len(before[-1]) == len("fsync ") + 32  # the temporary file
    assert after == ["fsync ab"]


def test_an_object_that_somebody_else_made_is_durable_before_it_is_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LocalDirectory(tmp_path).create("shards/ab/x", b"data")
    synced: list[str] = []
    fsync = os.fsync

    def watched_fsync(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    assert not LocalDirectory(tmp_path).create("shards/ab/x", b"data")
    assert {tmp_path.name, "shards", "ab"} <= set(synced)


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "models"
    (root / "shards").mkdir(parents=True)
    (root / "shards" / "aa").symlink_to(outside)
    (root / "shards" / "bb").symlink_to(outside / "secret")
    directory = LocalDirectory(root)
    for name in ("shards/aa/secret", "shards/bb"):
        with pytest.raises(ObjectRefused):
            directory.read(name, max_bytes=100)
    with pytest.raises(WriteFailed):
        directory.create("shards/aa/new", b"evil")
    assert not directory.create("shards/bb", b"evil")
    with pytest.raises(WriteFailed):
        directory.delete("shards/aa/secret")
    assert {entry.name for entry in directory.list("shards")} == {"shards/aa", "shards/bb"}
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_only_regular_files_are_read_and_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ObjectRefused, match="not a regular file"):
            LocalDirectory(tmp_path).read(name, max_bytes=100)


def test_reading_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shards").write_bytes(b"")
    with pytest.raises(ObjectRefused):
        LocalDirectory(tmp_path).read("shards/x", max_bytes=1)
    with pytest.raises(StoreError):
        LocalDirectory(tmp_path).list("shards")


def test_names_that_no_object_can_have_are_not_listed(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path)
    directory.create("a/b", b"")
    (tmp_path / "a" / ".DS_Store").write_bytes(b"")
    (tmp_path / "a" / "two words").write_bytes(b"")
    assert [entry.name for entry in directory.list("a")] == ["a/b"]


def test_a_file_system_without_links_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(StoreUnsupported, match="no hard links"):
        LocalDirectory(tmp_path).create("a", b"")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_no_file_stays_open(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path)
    (tmp_path / "folder").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    directory.create("a/b", b"1")
    directory.create("a/b", b"2")
    directory.read("a/b", max_bytes=1)
    directory.list("a")
    for name in ("folder", "a/missing", "b/missing"):
        with pytest.raises(StoreError):
            directory.read(name, max_bytes=1)
    directory.delete("a/b")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "location", ["", "file", "ftp://bucket/prefix", "s3://", "s3://bucket/a/../b", "s3://b/a%2e"]
)
def test_a_location_that_can_hold_no_store_is_wrong_usage(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"")
    with pytest.raises(WrongUsage):
        objects_at(location)


def test_a_listing_can_begin_after_a_name_and_can_be_of_names_alone(objects: Objects) -> None:
    names = [f"versions/{number:08d}.json" for number in range(1, 8)]
    for name in (*names, "channels/a/00000009.json"):
        objects.create(name, b"x")
    assert sorted(objects.list_names("versions")) == names
    for place in (0, 3, 6):
        found = objects.list("versions", after=names[place])
        assert sorted(entry.name for entry in found) == names[place + 1 :]
    assert list(objects.list_names("nothing")) == []
    assert list(objects.list("nothing", after="nothing/a")) == []
