"""One file with what another store lacks: written, carried, taken, torn, forged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from model_store.cli.main import main
from model_store.errors import BundleRefused, CopyRefused, RecordInvalid, WrongUsage
from model_store.layout import shard_name
from model_store.maintenance.bundle import (
    MAGIC,
    BundledObject,
    BundleIndex,
    take_bundle,
    write_bundle,
)
from model_store.maintenance.forget import delete_version, forget_class
from model_store.records.manifest import delta_of
from model_store.records.sealing import seal_record, unseal_record
from model_store.records.signing import Keys, Trust, load_signer, new_signer, save_trust
from model_store.store.store import Store, list_shards
from tests.model_store.commands import Capture
from tests.model_store.drafts import prepare, publish_lineage

CONTENT = ("shards", "versions", "channels", "deleted", "forgotten")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(str(tmp_path / "here"))
    publish_lineage(store, 3)
    return store


def content(store: Store) -> dict[str, bytes]:
    names = [name for folder in CONTENT for name in store.objects.list_names(folder)]
    return {name: store.objects.read(name, max_bytes=1 << 30) for name in names}


def index_of(path: Path) -> tuple[BundleIndex, int]:
    data = path.read_bytes()
    begin = len(MAGIC) + 8
    end = begin + int.from_bytes(data[len(MAGIC) : begin], "little")
    return unseal_record("index", data[begin:end], BundleIndex), end


def rewritten(path: Path, change: Callable[[tuple[BundledObject, ...]], object]) -> None:
    """Put another list of objects above the same bytes, with a digest that fits it."""
    (index, end), data = index_of(path), path.read_bytes()
    sealed = seal_record(index.model_copy(update={"objects": change(index.objects)}))
    path.write_bytes(MAGIC + len(sealed).to_bytes(8, "little") + sealed + data[end:])


def test_a_complete_bundle_makes_the_same_store(store: Store, tmp_path: Path) -> None:
    store.rollback(channel="production", to=2, actor="a", reason="")
    delete_version(store, 3, actor="a", reason="")
    forget_class(store, "class-0a", actor="a", reason="")
    made = write_bundle(store, tmp_path / "all", since=0)
    assert made.versions == [1, 2]
    assert made.bytes == (tmp_path / "all").stat().st_size
    report = take_bundle(tmp_path / "all", str(tmp_path / "there"))
    there = Store.open(str(tmp_path / "there"))
    expected = content(store)
    assert content(there) == {
        name: data for name, data in expected.items() if name in content(there)
    }
    assert (report.versions, report.records) == ([1, 2], 4)
    assert there.verify().ok


def test_a_bundle_since_a_version_has_the_new_shards_alone(store: Store, tmp_path: Path) -> None:
    old = str(tmp_path / "there")
    take_bundle(written(store, tmp_path / "first"), old)
    fourth = prepare(parent=store.manifest(3), task="more", classes=["x", "y"]).publish(store)
    store.promote(4, channel="production", actor="a", reason="")
    made = write_bundle(store, tmp_path / "delta", since=3)
    named = {ref.sha256 for ref in fourth.shards} - {ref.sha256 for ref in store.manifest(3).shards}
    shards = [one for one in index_of(tmp_path / "delta")[0].objects if "shards/" in one.name]
    assert {one.sha256 for one in shards} == named
    assert {ref.sha256 for ref in delta_of(fourth, store.manifest(3))} <= named
    report = take_bundle(tmp_path / "delta", old)
    assert (made.versions, report.versions, report.shards) == ([4], [4], len(named))
    assert content(Store.open(old)) == content(store)
    head = Store.open(old).head("production")
    assert head is not None
    assert head.target == 4
    assert take_bundle(tmp_path / "delta", old).versions == []  # again


def written(store: Store, path: Path, *, since: int = 0) -> Path:
    write_bundle(store, path, since=since)
    return path


def test_a_store_that_lacks_what_the_bundle_builds_on_is_left_alone(
    store: Store, tmp_path: Path
) -> None:
    path = written(store, tmp_path / "delta", since=2)
    with pytest.raises(CopyRefused, match=r"lacks shards of version 1.*a smaller --since"):
        take_bundle(path, str(tmp_path / "there"))
    assert not (tmp_path / "there").exists()


def test_a_bundle_of_another_store_is_refused(store: Store, tmp_path: Path) -> None:
    other = Store.create(str(tmp_path / "other"))
    prepare(task="pets", classes=["cat", "dog"]).publish(other)
    before = content(other)
    with pytest.raises(CopyRefused, match="has another version 1 than"):
        take_bundle(written(store, tmp_path / "all"), other.location)
    assert content(other) == before


def test_nothing_of_a_torn_bundle_is_taken(store: Store, tmp_path: Path) -> None:
    path = written(store, tmp_path / "all")
    whole = path.read_bytes()
    torn = (*range(0, len(whole), max(1, len(whole) // 40)), len(whole) - 1)
    for length in torn:
        path.write_bytes(whole[:length])
        with pytest.raises((BundleRefused, RecordInvalid)):
            take_bundle(path, str(tmp_path / "there"))
    path.write_bytes(whole + b"\0")
    with pytest.raises(BundleRefused, match="something follows its end"):
        take_bundle(path, str(tmp_path / "there"))
    assert not (tmp_path / "there").exists()


def test_a_flipped_byte_is_never_taken_for_an_object(store: Store, tmp_path: Path) -> None:
    path = written(store, tmp_path / "all")
    whole, (_, end) = path.read_bytes(), index_of(path)
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        there = tmp_path / f"there-{place}"
        assert main(["unbundle", str(path), "--store", str(there)]) == 1
        if place < end:
            assert not there.exists()
        elif there.exists():  # the copy had begun: what it took is sound
            report = Store.open(str(there)).verify()
            assert report.ok


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "shards/../x", "tmp/x", "keys/ann.pem", "", "store.json/x"],
)
def test_a_name_that_no_store_has_is_refused(store: Store, tmp_path: Path, name: str) -> None:
    path = written(store, tmp_path / "all")
    rewritten(path, lambda old: (old[0], old[1].model_copy(update={"name": name}), *old[2:]))
    with pytest.raises(BundleRefused, match="has no place in a store"):
        take_bundle(path, str(tmp_path / "there"))
    rewritten(path, lambda old: (old[0], old[0], *old[2:]))
    with pytest.raises(BundleRefused, match="has no place in a store"):
        take_bundle(path, str(tmp_path / "there"))
    assert not (tmp_path / "there").exists()


def test_what_is_no_bundle_is_refused_in_a_sentence(tmp_path: Path, capsys: Capture) -> None:
    place = ["--store", str(tmp_path / "there")]
    for data in (b"", b"PK\3\4", MAGIC, MAGIC + b"\xff" * 8, MAGIC + bytes(8)):
        (tmp_path / "file").write_bytes(data)
        assert main(["unbundle", str(tmp_path / "file"), *place]) == 1
        assert "error: " in capsys.readouterr().err
    for path in (tmp_path, tmp_path / "nothing"):
        assert main(["unbundle", str(path), *place]) == 2
        assert "is not a file that can be read" in capsys.readouterr().err
    assert not (tmp_path / "there").exists()


def test_another_shard_under_a_right_name_is_not_taken(store: Store, tmp_path: Path) -> None:
    """The index says what its writer likes: the name of a shard is what its bytes have to fit."""
    path = written(store, tmp_path / "all")
    index, end = index_of(path)
    first = next(one for one in index.objects if one.name.startswith("shards/"))
    place = end + sum(one.bytes for one in index.objects[: index.objects.index(first)])
    data = bytearray(path.read_bytes())
    data[place : place + first.bytes] = bytes(first.bytes)
    path.write_bytes(bytes(data))
    forged = BundledObject(
        name=first.name,
        bytes=first.bytes,
        sha256=__import__("hashlib").sha256(bytes(first.bytes)).hexdigest(),
    )
    rewritten(path, lambda old: tuple(forged if one == first else one for one in old))
    assert main(["unbundle", str(path), "--store", str(tmp_path / "there")]) == 1
    there = Store.open(str(tmp_path / "there"))
    assert first.sha256 not in list_shards(there)


def test_a_bundle_is_never_overwritten_and_leaves_nothing_when_it_fails(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    path = written(store, tmp_path / "all")
    with pytest.raises(WrongUsage, match="never overwritten"):
        write_bundle(store, path, since=0)
    where = ["--store", store.location]
    assert main(["bundle", "--since", "9", "--out", str(tmp_path / "new"), *where]) == 1
    assert "the newest is 3" in capsys.readouterr().err
    (ref, *_) = store.manifest(3).shards
    store.objects.delete(shard_name(ref.sha256))
    assert main(["bundle", "--out", str(tmp_path / "new"), *where]) == 1
    assert main(["bundle", "--out", str(tmp_path / "no" / "new"), *where]) == 1
    assert "No such file" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["all", "here"]


def test_with_a_trust_file_only_signed_versions_and_moves_are_taken(
    tmp_path: Path, capsys: Capture
) -> None:
    new_signer(tmp_path / "ann.pem")
    ann = load_signer(tmp_path / "ann.pem")
    save_trust(tmp_path / "trust.json", Trust({"ann": ann.public}))
    trust = Trust({"ann": ann.public})
    store = Store.create(str(tmp_path / "here"), keys=Keys(signer=ann, trust=trust))
    pets = prepare(task="pets", classes=["cat", "dog"])
    first = store.publish(pets.draft, shards=pets.shards, signer=ann)
    store.promote(1, channel="production", actor="a", reason="")
    there = str(tmp_path / "there")
    given = ["--store", there, "--trust", str(tmp_path / "trust.json")]
    assert main(["unbundle", str(written(store, tmp_path / "signed")), *given]) == 0
    prepare(parent=first, task="cars", classes=["bus"]).publish(store)  # by nobody
    assert main(["unbundle", str(written(store, tmp_path / "forged", since=1)), *given]) == 1
    said = capsys.readouterr().err
    assert "version 2" in said or "versions/00000002" in said
    assert "nothing was taken" in said
    assert Store.open(there).versions() == [1]
    delete_version(store, 2, actor="a", reason="")
    mallorys = Store.open(store.location)
    mallorys.promote(1, channel="stable", actor="mallory", reason="")
    assert main(["unbundle", str(written(mallorys, tmp_path / "moved", since=1)), *given]) == 1
    assert "nothing was taken" in capsys.readouterr().err
    assert Store.open(there).channels() == ["production"]


def test_what_is_taken_is_signed_again_for_the_store(
    store: Store, tmp_path: Path, capsys: Capture
) -> None:
    new_signer(tmp_path / "ann.pem")
    save_trust(tmp_path / "trust.json", Trust({"ann": load_signer(tmp_path / "ann.pem").public}))
    place = ["--store", str(tmp_path / "there")]
    out = ["--out", str(tmp_path / "all"), "--store", store.location, "--json"]
    assert main(["bundle", *out]) == 0
    assert json.loads(capsys.readouterr().out)["versions"] == [1, 2, 3]
    signed = ["--sign", str(tmp_path / "ann.pem"), "--json"]
    assert main(["unbundle", str(tmp_path / "all"), *place, *signed]) == 0
    assert json.loads(capsys.readouterr().out)["signed"] == [1, 2, 3]
    trusting = ["--require-signatures", "--trust", str(tmp_path / "trust.json")]
    assert main(["verify", *place, *trusting]) == 0
