from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_store.backends.local import LocalDirectory
from model_store.cli.main import main
from model_store.errors import CopyRefused, ShardCorrupt, SignatureRefused, StoreError
from model_store.layout import shard_name, version_name
from model_store.maintenance.copy import copy_store
from model_store.maintenance.forget import delete_version, forget_class
from model_store.records.manifest import Manifest, reseal
from model_store.records.quality import Gate
from model_store.records.signing import (
    Keys,
    Signer,
    Trust,
    load_signer,
    load_trust,
    new_signer,
    save_trust,
)
from model_store.store.store import Store
from tests.model_store.backends import MemoryObjects, WatchedObjects
from tests.model_store.commands import Capture
from tests.model_store.drafts import prepare, publish_lineage
from tests.model_store.form_1 import with_form_1


@pytest.fixture
def source() -> Store:
    store = Store.create("source", objects=WatchedObjects(MemoryObjects()))
    publish_lineage(store, 3)
    store.rollback(channel="production", to=2, actor="a", reason="")
    return store


@pytest.fixture
def watched() -> WatchedObjects:
    return WatchedObjects(MemoryObjects())


@pytest.fixture
def target(watched: WatchedObjects) -> Store:
    return Store.create("target", objects=watched)


def _content(store: Store) -> dict[str, bytes]:
    folders = ("shards", "versions", "channels", "deleted", "forgotten", "runs")
    names = [entry.name for folder in folders for entry in store.objects.list(folder)]
    return {name: store.objects.read(name, max_bytes=1 << 30) for name in names}


def test_a_copy_has_the_same_versions_shards_and_channels(source: Store, target: Store) -> None:
    report = copy_store(source, target)
    assert _content(target) == _content(source)
    assert report.versions == [1, 2, 3]
    assert (report.shards, report.records) == (12, 4)
    assert report.moved_on == report.remembered == []
    assert target.id != source.id
    assert target.verify().problems == ()


def test_between_a_directory_and_memory_in_both_directions(source: Store, tmp_path: Path) -> None:
    there = Store.create("there", objects=LocalDirectory(tmp_path / "there"))
    back = Store.create("back", objects=MemoryObjects())
    copy_store(source, there)
    copy_store(there, back)
    assert _content(back) == _content(source)


def test_the_second_copy_writes_and_reads_no_shard(
    source: Store, target: Store, watched: WatchedObjects
) -> None:
    copy_store(source, target)
    watched.calls.clear()
    report = copy_store(source, target)
    assert (report.versions, report.shards, report.bytes, report.records) == ([], 0, 0, 0)
    assert not [name for verb, name in watched.calls if name.startswith("shards/")]
    created = watched.names("create")
    assert all(name.startswith("runs/") for name in created)


def test_only_what_is_new_is_copied(source: Store, target: Store) -> None:
    copy_store(source, target)
    prepared = prepare(parent=source.manifest(3), seed=8)
    prepared.publish(source)
    report = copy_store(source, target)
    assert report.versions == [4]
    assert report.bytes == sum(map(len, prepared.shards.values()))


@pytest.mark.parametrize("stop_at", range(1, 20, 3))
def test_a_copy_that_is_stopped_anywhere_is_whole_versions_and_goes_on(
    source: Store, target: Store, watched: WatchedObjects, stop_at: int
) -> None:
    created: list[str] = []

    def stop(verb: str, name: str) -> None:
        if verb == "create":
            created.append(name)
            if len(created) == stop_at:
                raise KeyboardInterrupt

    watched.before = stop
    with pytest.raises(KeyboardInterrupt):
        copy_store(source, target)
    watched.before = lambda verb, name: None
    assert target.verify().problems == ()
    before = {entry.name for entry in watched.list("shards")}
    report = copy_store(source, target)
    assert report.shards == 12 - len(before)
    target.withdraw(created[0].removeprefix("runs/").removesuffix(".json"))
    assert _content(target) == _content(source)


def test_progress_counts_the_bytes_that_are_missing(source: Store, target: Store) -> None:
    seen: list[tuple[int, int]] = []
    report = copy_store(source, target, progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, report.bytes)
    assert seen[-1] == (report.bytes, report.bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_stores_that_were_filled_separately_are_not_mixed(
    source: Store, target: Store, watched: WatchedObjects
) -> None:
    prepare(seed=5).publish(target)
    before = _content(target)
    with pytest.raises(CopyRefused, match="another version 1"):
        copy_store(source, target)
    assert _content(target) == before


def test_a_version_that_is_published_in_the_target_meanwhile_stops_the_copy(
    source: Store, target: Store, watched: WatchedObjects
) -> None:
    def meanwhile(verb: str, name: str) -> None:
        if (verb, name) == ("create", version_name(2)):
            watched.before = lambda verb, name: None
            other = Store.open("target", objects=watched.objects)
            prepare(parent=other.manifest(1), seed=9).publish(other)

    watched.before = meanwhile
    with pytest.raises(CopyRefused, match="meanwhile"):
        copy_store(source, target)
    assert target.verify().problems == ()


def test_a_channel_that_moved_on_in_the_target_is_left_alone(source: Store, target: Store) -> None:
    copy_store(source, target)
    target.promote(1, channel="production", actor="b", reason="")
    source.promote(3, channel="production", actor="a", reason="")
    source.promote(3, channel="staging", actor="a", reason="")
    report = copy_store(source, target)
    assert report.moved_on == ["production"]
    head = target.head("production")
    assert head is not None
    assert head.target == 1
    assert target.channels() == ["production", "staging"]


def test_deleted_versions_stay_deleted(source: Store, target: Store) -> None:
    delete_version(source, 1, actor="a", reason="")
    copy_store(source, target)
    assert target.versions() == [2, 3]
    assert target.is_deleted(1)
    assert target.verify().problems == ()
    delete_version(target, 3, actor="a", reason="")
    assert copy_store(source, target).versions == []
    assert target.versions() == [2]


def test_what_the_source_has_deleted_since_is_kept_in_the_target(
    source: Store, target: Store
) -> None:
    copy_store(source, target)
    delete_version(source, 1, actor="a", reason="")
    copy_store(source, target)
    assert target.versions() == [1, 2, 3]
    assert target.verify().problems == ()


def test_forgotten_images_are_not_copied_and_not_missed(source: Store, target: Store) -> None:
    forget_class(source, "class-0a", actor="a", reason="")
    copy_store(source, target)
    assert target.forgotten() == source.forgotten() != frozenset()
    assert target.verify().problems == ()


def test_what_the_target_has_forgotten_does_not_come_back(source: Store, target: Store) -> None:
    copy_store(source, target)
    forget_class(target, "class-0a", actor="a", reason="")
    copy_store(source, target)
    (sha256,) = target.forgotten()
    assert shard_name(sha256) not in {entry.name for entry in target.objects.list("shards")}


def test_what_the_source_forgot_and_the_target_still_has_is_said(
    source: Store, target: Store
) -> None:
    copy_store(source, target)
    (sha256,) = forget_class(source, "class-0a", actor="a", reason="").shards
    assert copy_store(source, target).remembered == [sha256]
    assert target.verify().problems == ()


def test_a_copy_mends_a_shard_that_the_target_has_lost(
    source: Store, target: Store, watched: WatchedObjects
) -> None:
    copy_store(source, target)
    lost = shard_name(source.manifest(1).classifier.sha256)
    watched.delete(lost)
    assert not target.verify().ok
    assert copy_store(source, target).shards == 1
    assert target.verify().problems == ()


@pytest.mark.parametrize("where", ["source", "target"])
def test_damaged_shards_are_not_passed_on(source: Store, target: Store, where: str) -> None:
    sha256 = source.manifest(1).classifier.sha256
    objects = source.objects if where == "source" else target.objects
    objects.delete(shard_name(sha256))
    objects.create(shard_name(sha256), b"\0" * source.manifest(1).classifier.bytes)
    with pytest.raises(ShardCorrupt):
        copy_store(source, target)
    assert target.versions() == []


def test_a_damaged_source_is_not_copied(source: Store, target: Store) -> None:
    source.objects.delete(version_name(2))
    with pytest.raises(StoreError, match="not known which shards are needed"):
        copy_store(source, target)
    assert _content(target) == {}


def test_signed_and_unsigned_manifests_keep_their_bytes(source: Store, target: Store) -> None:
    manifests: list[Manifest] = [source.manifest(version) for version in source.versions()]
    copy_store(source, target)
    assert [target.manifest(one.version).digest for one in manifests] == [
        one.digest for one in manifests
    ]


# Signatures


@pytest.fixture
def staging(keys: Keys) -> Store:
    """A store of three versions; the second was not signed. All records of the channel are."""
    store = Store.create("staging", objects=MemoryObjects(), keys=keys)
    first = _publish(store, None, signer=keys.signer)
    second = _publish(store, first, signer=None, seed=1)
    _publish(store, second, signer=keys.signer, seed=2)
    for version in (1, 3):
        store.promote(version, channel="production", actor="a", reason="")
    return store


def _publish(store: Store, parent: Manifest | None, *, signer: Signer | None, seed: int = 0) -> Any:
    made = prepare(parent=parent, seed=seed)
    return store.publish(made.draft, shards=made.shards, signer=signer)


def test_a_copy_as_it_is_is_not_trusted_in_its_store(
    staging: Store, target: Store, keys: Keys
) -> None:
    report = copy_store(staging, target)
    assert (report.signed, report.foreign, report.unsigned) == ([], [1, 3], {"production": 3})
    assert keys.trust is not None
    with pytest.raises(SignatureRefused, match=f"signed for store {staging.id}"):
        keys.trust.check(target.manifest(3), store=target.id)


def test_a_copy_that_is_signed_again_is_trusted_where_the_source_was(
    staging: Store, watched: WatchedObjects, target: Store, keys: Keys
) -> None:
    report = copy_store(staging, target, keys=keys)
    assert (report.signed, report.foreign, report.unsigned) == ([1, 3], [], {})
    trusting = Store.open("target", objects=watched, keys=keys)
    head = trusting.head("production")
    assert head is not None
    assert trusting.resolve(head).version == 3
    assert target.verify().ok
    (problem,) = target.verify(trust=keys.trust).problems
    assert problem.startswith(version_name(2))
    again = copy_store(staging, target, keys=keys)
    assert (again.versions, again.records, again.moved_on) == ([], 0, [])


def test_without_a_trust_file_all_is_signed_but_what_the_gate_refused(
    source: Store, target: Store, keys: Keys
) -> None:
    refused = prepare(parent=source.manifest(3), seed=9)
    gate = Gate(passed=False, reasons=("it got worse",))
    metrics = refused.draft.metrics.model_copy(update={"gate": gate})
    draft = refused.draft.model_copy(update={"metrics": metrics})
    source.publish(draft, shards=refused.shards)
    report = copy_store(source, target, keys=Keys(signer=keys.signer))
    assert (report.versions, report.signed, report.unsigned) == ([1, 2, 3, 4], [1, 2, 3], {})


def test_versions_after_a_deleted_one_are_signed_again(
    staging: Store, target: Store, keys: Keys
) -> None:
    delete_version(staging, 2, actor="a", reason="")
    assert copy_store(staging, target, keys=keys).signed == [1, 3]
    assert target.verify(trust=keys.trust).ok


def test_the_command_signs_again_or_says_who_will_refuse_the_copy(
    location: str, tmp_path: Path, capsys: Capture
) -> None:
    ann, trust = tmp_path / "key.pem", str(tmp_path / "trust.json")
    save_trust(Path(trust), Trust({"ann": new_signer(ann).public}))
    keys = Keys(signer=load_signer(ann), trust=load_trust(Path(trust)))
    store = Store.open(location, keys=keys)
    _publish(store, None, signer=keys.signer)
    store.promote(1, channel="production", actor="a", reason="")
    at = ("copy", "--store", location, "--to")
    assert main([*at, str(tmp_path / "plain")]) == 0
    said = "has 1 version signed for another store, which servers that require signatures refuse"
    assert said in capsys.readouterr().err
    assert main([*at, str(tmp_path / "signed"), "--sign", str(ann), "--trust", trust]) == 0
    out, err = capsys.readouterr()
    assert "1 version signed for it" in out
    assert "note" not in err
    strict = ("verify", "--require-signatures", "--trust", trust, "--store")
    assert main([*strict, str(tmp_path / "plain")]) == 1
    assert main([*strict, str(tmp_path / "signed")]) == 0


def test_versions_of_form_1_are_signed_again_and_the_next_step_for_the_channel_is_told(
    location: str, tmp_path: Path, capsys: Capture
) -> None:
    key, trust = tmp_path / "ann.pem", str(tmp_path / "trust.json")
    save_trust(Path(trust), Trust({"ann": new_signer(key).public}))
    store = Store.open(location)
    old = with_form_1(prepare().publish(store), key)
    Path(location, version_name(1)).write_bytes(reseal(old))
    store.promote(1, channel="production", actor="a", reason="")
    new = str(tmp_path / "new")
    keys = ("--sign", str(key), "--trust", trust)
    assert main(["copy", "--store", location, "--to", new, *keys]) == 0
    step = f"promote 1 --channel production --store {new} --sign KEYFILE --trust FILE"
    assert step in capsys.readouterr().err
    assert main(["promote", "1", "--channel", "production", "--store", new, *keys]) == 0
    assert Store.open(new).verify(trust=load_trust(Path(trust))).ok
