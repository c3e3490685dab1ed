from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from model_store.backends.s3 import ObjectStorage
from model_store.errors import ShardMissing, WrongUsage
from model_store.layout import shard_name
from model_store.records.manifest import ShardKind, ShardRef
from model_store.store.cache import ShardCache, shard_cache
from model_store.store.store import Store
from tests.model_store.drafts import publish_lineage


class Far:
    """A distant store: remembers what was asked of it."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.asked: list[str] = []

    def add(self, data: bytes, *, kind: ShardKind = "expert") -> ShardRef:
        sha256 = hashlib.sha256(data).hexdigest()
        self.held[sha256] = data
        return ShardRef(kind=kind, sha256=sha256, bytes=len(data))

    def fetch(self, ref: ShardRef) -> bytes:
        self.asked.append(ref.sha256)
        return self.held[ref.sha256]


@pytest.fixture
def far() -> Far:
    return Far()


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(root=tmp_path / "above" / "cache", max_bytes=100)


def test_what_was_fetched_once_is_not_fetched_again(cache: ShardCache, far: Far) -> None:
    ref = far.add(b"weights")
    assert [cache.read(ref, fetch=far.fetch) for _ in range(3)] == [b"weights"] * 3
    assert far.asked == [ref.sha256]


@pytest.mark.parametrize("damaged", [b"weightz", b"weight", b"weights and more", b""])
def test_a_damaged_file_is_fetched_again_and_replaced(
    cache: ShardCache, far: Far, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ref = far.add(b"weights")
    cache.read(ref, fetch=far.fetch)
    (cache.root / ref.sha256).write_bytes(damaged)
    assert cache.read(ref, fetch=far.fetch) == b"weights"
    assert "damaged" in caplog.text
    assert cache.read(ref, fetch=far.fetch) == b"weights"
    assert far.asked == [ref.sha256] * 2


def test_what_was_used_longest_ago_makes_room(cache: ShardCache, far: Far) -> None:
    refs = [far.add(bytes([number]) * 30) for number in range(4)]
    for age, ref in enumerate(reversed(refs[:3])):
        cache.read(ref, fetch=far.fetch)
        os.utime(cache.root / ref.sha256, (age, age))
    cache.read(refs[2], fetch=far.fetch)  # of use just now, so no longer the oldest
    cache.read(refs[3], fetch=far.fetch)
    assert {path.name for path in cache.root.iterdir()} == {
        ref.sha256 for ref in (refs[0], refs[2], refs[3])
    }


def test_it_never_holds_more_than_it_may(cache: ShardCache, far: Far) -> None:
    (cache.root).mkdir(parents=True)
    (cache.root / f"tmp-{'0' * 32}").write_bytes(bytes(90))  # left by a kill
    for number in range(20):
        cache.read(far.add(bytes([number]) * (number * 5)), fetch=far.fetch)
        assert sum(path.stat().st_size for path in cache.root.iterdir()) <= 100


def test_making_room_touches_nothing_that_the_cache_did_not_make(
    cache: ShardCache, far: Far, tmp_path: Path
) -> None:
    cache.root.mkdir(parents=True)
    digest = "a" * 64
    strangers = [
        *("thesis.tex", "tmp-notes", f"tmp-{'0' * 31}", f"tmp-{'0' * 32}.bak", f"{digest}.old"),
        *(digest[:63], digest.upper(), f" {digest}", f"{digest}\n", "bfloat16.json"),
    ]
    for name in strangers:
        (cache.root / name).write_bytes(bytes(90))
    (cache.root / digest).mkdir()
    (cache.root / digest / "inside").write_bytes(bytes(90))
    (cache.root / ("b" * 64)).symlink_to(tmp_path / "elsewhere")
    for path in cache.root.iterdir():
        os.utime(path, (1, 1), follow_symlinks=False)
    kept = far.add(bytes(60))
    cache.read(kept, fetch=far.fetch)
    cache.read(far.add(bytes(50)), fetch=far.fetch)
    there = {path.name for path in cache.root.iterdir()}
    assert there > {*strangers, digest, "b" * 64}
    assert (cache.root / digest / "inside").exists()
    assert kept.sha256 not in there, "what strangers hold is not room that the cache takes"
    cache.read(kept, fetch=far.fetch)
    assert far.asked.count(kept.sha256) == 2


def test_a_shard_that_is_larger_than_all_the_room_is_passed_through(
    cache: ShardCache, far: Far
) -> None:
    kept, large = far.add(b"weights"), far.add(bytes(101))
    for ref in (kept, large, large, kept):
        assert cache.read(ref, fetch=far.fetch) == far.held[ref.sha256]
    assert far.asked == [kept.sha256, large.sha256, large.sha256]


@pytest.mark.parametrize("kind", ["memory", "held-out"])
def test_images_are_never_kept(cache: ShardCache, far: Far, kind: ShardKind) -> None:
    ref = far.add(b"a face", kind=kind)
    cache.read(ref, fetch=far.fetch)
    assert not cache.root.exists()


@pytest.mark.parametrize("planted", ["file for folder", "symlink", "pipe", "folder"])
def test_whatever_is_in_the_way_costs_a_download_and_nothing_more(
    cache: ShardCache, far: Far, planted: str, tmp_path: Path
) -> None:
    ref = far.add(b"weights")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"of somebody else")
    cache.root.parent.mkdir()
    if planted == "file for folder":
        cache.root.write_bytes(b"")
    else:
        cache.root.mkdir()
        place = cache.root / ref.sha256
        match planted:
            case "symlink":
                place.symlink_to(elsewhere)
            case "pipe":
                os.mkfifo(place)
            case _:
                place.mkdir()
    assert cache.read(ref, fetch=far.fetch) == b"weights"
    assert cache.read(ref, fetch=far.fetch) == b"weights"
    assert elsewhere.read_bytes() == b"of somebody else"


def test_only_the_owner_can_look_into_it(cache: ShardCache, far: Far) -> None:
    ref = far.add(b"weights")
    cache.read(ref, fetch=far.fetch)
    assert cache.root.stat().st_mode & 0o077 == 0
    assert (cache.root / ref.sha256).stat().st_mode & 0o077 == 0


def test_a_directory_needs_no_cache() -> None:
    assert shard_cache("./models") is None


def test_the_environment_says_where_and_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DNE_CACHE", "/a/b")
    monkeypatch.setenv("DNE_CACHE_BYTES", "123")
    assert shard_cache("s3://bucket/x") == ShardCache(root=Path("/a/b"), max_bytes=123)
    monkeypatch.delenv("DNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert shard_cache("s3://bucket/x") == ShardCache(root=Path("/c/dne-serve"), max_bytes=123)
    monkeypatch.setenv("DNE_CACHE_BYTES", "0")
    assert shard_cache("s3://bucket/x") is None
    monkeypatch.setenv("DNE_CACHE_BYTES", "8 GiB")
    with pytest.raises(WrongUsage, match="'8 GiB', which is not a number of bytes"):
        shard_cache("s3://bucket/x")


def test_a_server_loads_from_the_cache_and_verify_does_not(s3_location: str) -> None:
    store = Store.create(s3_location)
    (manifest,) = publish_lineage(store, 1)
    weights = {ref: store.read_shard(ref) for ref in manifest.model_shards}
    ObjectStorage(s3_location).delete(shard_name(manifest.classifier.sha256))
    again = Store.open(s3_location)
    assert {ref: again.read_shard(ref) for ref in manifest.model_shards} == weights
    assert manifest.classifier.sha256 in " ".join(again.verify().problems)
    with pytest.raises(ShardMissing):
        again.read_stored_shard(manifest.classifier)
