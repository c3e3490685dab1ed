"""A store may borrow experts from other stores, which keep them for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_store.backends.location import WAY, follow_way, way_between
from model_store.cli.main import main
from model_store.errors import (
    AlternateRefused,
    RecordInvalid,
    ShardUnreachable,
    StillBorrows,
    StoreError,
    WrongUsage,
)
from model_store.layout import STORE, shard_name
from model_store.maintenance.copy import copy_store
from model_store.maintenance.forget import delete_version, forget_class
from model_store.maintenance.gc import collect_garbage, report_storage
from model_store.records.gc_marks import list_condemned
from model_store.records.manifest import Manifest
from model_store.records.sealing import create_record, seal
from model_store.store.alternates import (
    Alternate,
    StoreRecord,
    borrower_records,
    list_borrowers,
    release,
)
from model_store.store.store import Store, list_shards
from tests.model_store.commands import Capture, json_of
from tests.model_store.drafts import prepare, publish_lineage
from tests.tiny_versions import publish_tiny

Place = Callable[[str], str]
A, B = "a" * 32, "b" * 32


@pytest.fixture(params=["directories", "seaweedfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Locations of stores beside each other, on each kind of backend that people have."""
    root = str(tmp_path)
    if request.param == "seaweedfs":
        root = request.getfixturevalue("s3_location")
    return lambda name: f"{root}/{name}"


@pytest.fixture
def shared(place: Place) -> Store:
    """A store whose version 1 has the expert that all drafts begin with."""
    store = Store.create(place("shared"))
    publish_lineage(store, 1)
    return store


@pytest.fixture
def borrower(place: Place, shared: Store) -> Store:
    """Versions 1 and 2 of a store that has the expert of version 1 from another one."""
    store = Store.create(place("acme"), alternates=[shared.location])
    publish_lineage(store, 2)
    return store


def experts_in(store: Store) -> set[str]:
    named = {ref.sha256 for n in store.versions() for ref in store.manifest(n).experts}
    return named & list_shards(store).keys()


def sweep(store: Store) -> None:
    for _ in range(2):
        collect_garbage(store, dry_run=False, grace_s=0.0)


def _move_on(store: Store) -> Manifest:
    """Another version than the first one is served, which can be deleted then."""
    made = prepare(seed=9).publish(store)
    store.promote(made.version, channel="production", actor="a", reason="")
    return made


def plant(location: Path, *alternates: dict[str, str], id: str = A) -> str:
    """A store whose `store.json` a stranger wrote, with a digest that fits."""
    location.mkdir(parents=True)
    body: dict[str, Any] = {"format": 1, "id": id, "alternates": list(alternates)}
    (location / STORE).write_bytes(seal(body))
    return str(location)


# Borrowing


def test_an_expert_that_an_alternate_has_is_not_written_again(
    shared: Store, borrower: Store
) -> None:
    first, second = borrower.manifest(2).experts
    assert first == shared.manifest(1).experts[0]
    assert experts_in(borrower) == {second.sha256}
    assert borrower.read_shard(first) == shared.read_shard(first)
    assert borrower.verify().problems == ()
    assert shared.verify().problems == ()


def test_nothing_but_experts_is_borrowed(shared: Store, borrower: Store) -> None:
    """The first versions of both have the same classifier and the same pictures."""
    manifest = borrower.manifest(1)
    assert set(manifest.shards) == set(shared.manifest(1).shards)
    own = list_shards(borrower).keys()
    assert {ref.sha256 for ref in manifest.shards} - own == {manifest.experts[0].sha256}


def test_pictures_that_are_forgotten_are_gone_from_the_store_that_kept_them(
    shared: Store, borrower: Store
) -> None:
    forget_class(borrower, "class-0a", actor="a", reason="")
    assert borrower.verify().problems == ()
    pictures = shared.manifest(1).memory[0].shard
    assert pictures.sha256 not in list_shards(borrower)
    assert pictures.sha256 in list_shards(shared)  # a store of its own, with its own pictures
    forget_class(shared, "class-0a", actor="a", reason="")
    assert pictures.sha256 not in list_shards(shared)


def test_a_borrower_that_is_made_again_is_announced_and_not_changed(
    shared: Store, borrower: Store
) -> None:
    before = borrower.objects.read(STORE, max_bytes=1000)
    (record,) = borrower_records(shared.objects)
    shared.objects.delete(record)
    assert "has no record of this store" in borrower.verify().problems[0]
    Store.create(borrower.location, alternates=[shared.location])
    assert borrower_records(shared.objects) == [record]
    assert borrower.objects.read(STORE, max_bytes=1000) == before
    assert borrower.verify().problems == ()


def test_a_store_cannot_be_told_later_where_to_borrow(
    place: Place, shared: Store, borrower: Store
) -> None:
    plain = Store.create(place("plain"))
    with pytest.raises(WrongUsage, match="is a store already"):
        Store.create(plain.location, alternates=[shared.location])
    assert borrower_records(plain.objects) == []
    assert len(borrower_records(shared.objects)) == 1


def test_a_store_without_alternates_keeps_the_bytes_of_its_record(shared: Store) -> None:
    assert b"alternates" not in shared.objects.read(STORE, max_bytes=1000)


def test_an_alternate_that_fails_costs_a_copy_and_no_version(
    shared: Store, borrower: Store
) -> None:
    expert = shared.manifest(1).experts[0]
    shared.objects.delete(shard_name(expert.sha256))
    again = prepare(task="again").publish(borrower)
    assert again.experts[0] == expert
    assert expert.sha256 in list_shards(borrower)
    shared.objects.delete(STORE)
    prepare(task="and again", seed=3).publish(borrower)
    assert [p for p in borrower.verify().problems if "there is no store" not in p] == []


# Housekeeping of the store that lends


def test_gc_keeps_experts_for_borrowers_and_nothing_else(shared: Store, borrower: Store) -> None:
    extra = _move_on(shared)
    delete_version(shared, 1, actor="a", reason="")
    gone = [ref for ref in borrower.manifest(1).shards if ref.kind != "expert"]
    sweep(shared)
    report = collect_garbage(shared, dry_run=True)
    assert [one.name for one in report.lent] == [shard_name(borrower.manifest(1).experts[0].sha256)]
    assert not {ref.sha256 for ref in gone} & list_shards(shared).keys()
    assert {ref.sha256 for ref in extra.shards} <= list_shards(shared).keys()
    assert borrower.verify().problems == ()
    assert shared.verify().problems == ()


def test_a_borrower_saves_an_expert_that_was_condemned_before_it_came(
    place: Place, shared: Store
) -> None:
    _move_on(shared)
    first = shared.manifest(1)
    delete_version(shared, 1, actor="a", reason="")
    collect_garbage(shared, dry_run=False, grace_s=0.0)
    condemned = {mark.sha256 for mark in list_condemned(shared.objects).marks}
    assert condemned == {ref.sha256 for ref in first.shards}
    borrower = Store.create(place("acme"), alternates=[shared.location])
    prepare().publish(borrower)
    sweep(shared)
    assert list_shards(shared).keys() & condemned == {first.experts[0].sha256}
    assert borrower.verify().problems == ()


def test_a_borrower_is_released_when_it_is_gone_and_not_before(
    place: Place, shared: Store, borrower: Store
) -> None:
    (found,) = list_borrowers(shared.objects, location=shared.location)
    assert (found.id, found.state) == (borrower.id, "borrows")
    with pytest.raises(StillBorrows, match="it borrows from this one"):
        release(shared.objects, borrower.id, location=shared.location)
    whole = Store.create(place("whole"))
    copy_store(borrower, whole)
    borrower.objects.delete(STORE)
    (found,) = list_borrowers(shared.objects, location=shared.location)
    assert found.state == "gone"
    release(shared.objects, borrower.id, location=shared.location)
    assert borrower_records(shared.objects) == []
    assert whole.verify().problems == ()
    with pytest.raises(StoreError, match="no store with the id"):
        release(shared.objects, borrower.id, location=shared.location)


def test_another_store_in_the_place_of_a_borrower_does_not_borrow(
    place: Place, shared: Store, borrower: Store
) -> None:
    borrower.objects.delete(STORE)
    create_record(borrower.objects, STORE, StoreRecord(id=A))
    assert list_borrowers(shared.objects, location=shared.location)[0].state == "another store"


def test_a_damaged_record_of_a_borrower_still_protects(shared: Store) -> None:
    name = f"borrowers/{A}.{B}.json"
    shared.objects.create(name, b"junk")
    _move_on(shared)
    expert = shared.manifest(1).experts[0]
    delete_version(shared, 1, actor="a", reason="")
    sweep(shared)
    assert expert.sha256 in list_shards(shared)
    (problem,) = shared.verify().problems
    assert name in problem
    with pytest.raises(StillBorrows, match="cannot be trusted"):
        release(shared.objects, A, location=shared.location)


# Copies


def test_a_copy_to_a_place_without_the_alternate_is_whole(
    place: Place, shared: Store, borrower: Store
) -> None:
    whole = Store.create(place("whole"))
    report = copy_store(borrower, whole)
    assert report.shards == len({ref for n in (1, 2) for ref in borrower.manifest(n).shards})
    shared.objects.delete(STORE)
    assert Store.open(whole.location).verify().problems == ()


def test_a_copy_to_a_borrower_leaves_out_what_its_alternate_has(
    place: Place, shared: Store, borrower: Store
) -> None:
    whole = Store.create(place("whole"))
    copy_store(borrower, whole)
    again = Store.create(place("again"), alternates=[shared.location])
    steps: list[tuple[int, int]] = []
    report = copy_store(whole, again, progress=lambda done, total: steps.append((done, total)))
    assert list_shards(again).keys() == list_shards(borrower).keys()
    assert steps[-1] == (report.bytes, report.bytes)
    assert again.verify().problems == ()
    assert copy_store(whole, again).shards == 0


def test_storage_tells_stored_from_borrowed(shared: Store, borrower: Store) -> None:
    report = report_storage(borrower)
    assert report.borrowed == shared.manifest(1).experts[0].bytes
    assert report.stored == sum(entry.bytes for entry in list_shards(borrower).values())


# Alternates that cannot be used


def test_a_store_that_borrows_cannot_lend(place: Place, borrower: Store) -> None:
    with pytest.raises(AlternateRefused, match="borrows from another one itself"):
        Store.create(place("third"), alternates=[borrower.location])
    with pytest.raises(StoreError, match="there is no store"):
        Store.open(place("third"))


def test_an_alternate_that_vanished_or_was_replaced_is_named(
    place: Place, shared: Store, borrower: Store
) -> None:
    expert = borrower.manifest(1).experts[0]
    shared.objects.delete(STORE)
    with pytest.raises(ShardUnreachable, match=r"alternate \.\./shared: there is no store at"):
        Store.open(borrower.location).read_shard(expert)
    create_record(shared.objects, STORE, StoreRecord(id=A))
    with pytest.raises(ShardUnreachable, match=f"holds store {A}"):
        Store.open(borrower.location).read_shard(expert)
    assert len(Store.open(borrower.location).verify().problems) == 2
    assert Store.open(borrower.location).manifest(2).version == 2  # lists and moves need none


def test_an_alternate_that_begins_to_borrow_is_refused(shared: Store, borrower: Store) -> None:
    shared.objects.delete(STORE)
    loop = Alternate(id=borrower.id, location="../acme")
    create_record(shared.objects, STORE, StoreRecord(id=shared.id, alternates=(loop,)))
    opened = Store.open(borrower.location)
    with pytest.raises(ShardUnreachable, match="borrows from another one itself"):
        opened.read_shard(opened.manifest(1).experts[0])


def test_bytes_of_an_alternate_are_not_trusted(shared: Store, borrower: Store) -> None:
    expert = borrower.manifest(1).experts[0]
    data = bytearray(shared.read_shard(expert))
    data[-1] ^= 1
    shared.objects.delete(shard_name(expert.sha256))
    shared.objects.create(shard_name(expert.sha256), bytes(data))
    with pytest.raises(ShardUnreachable, match="its SHA-256 is"):
        borrower.read_stored_shard(expert)
    assert expert.sha256 in borrower.verify().problems[0]
    prepare(task="again").publish(borrower)  # with a copy of its own
    assert borrower.verify().problems == ()


@pytest.mark.parametrize(
    "location",
    ["/etc", "s3://elsewhere/models", "shared", "../shared/../../etc", "..", "../..", "../.",
     ".././x", "../a//b", "../a/", "../a\\b", "../a\nb", "../a\x00", "", "../" * 9 + "x",
     "../" + "x" * 129, "..//etc", "%2e%2e/x"],
)  # fmt: skip
def test_a_location_that_is_no_way_to_a_store_beside_is_refused(
    tmp_path: Path, location: str
) -> None:
    planted = plant(tmp_path / "planted", {"id": B, "location": location})
    with pytest.raises(RecordInvalid, match="alternates") as refused:
        Store.open(planted)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "alternates",
    [[{"id": A, "location": "../x"}], [{"id": B, "location": f"../{n}"} for n in "xy"],
     [{"id": f"{n:032x}", "location": f"../{n}"} for n in range(9)], [{"id": B}],
     [{"id": "B", "location": "../x"}], [{"id": B, "location": "../x", "more": "1"}]],
)  # fmt: skip
def test_alternates_that_are_no_list_of_a_few_other_stores_are_refused(
    tmp_path: Path, alternates: list[dict[str, str]]
) -> None:
    with pytest.raises(RecordInvalid):
        Store.open(plant(tmp_path / "planted", *alternates))


def test_a_way_out_of_the_bucket_is_refused() -> None:
    with pytest.raises(StoreError, match="leads out of s3://bucket/"):
        follow_way("s3://bucket/models/acme", "../../../other")
    assert follow_way("s3://bucket/models/acme", "../../other") == "s3://bucket/other"


@pytest.mark.parametrize(
    ("start", "end"),
    [("s3://one/a", "s3://two/b"), ("s3://one/a", "gs://one/b"), ("models", "s3://one/b"),
     ("s3://one/a", "s3://one/a/b"), ("s3://one/a/b", "s3://one/a"), ("x", "x"), ("x", "x/y"),
     ("s3://one/a", "s3://one")],
)  # fmt: skip
def test_only_a_store_beside_can_lend(start: str, end: str) -> None:
    with pytest.raises(WrongUsage, match="cannot borrow from"):
        way_between(start, end)


PARTS = st.lists(st.sampled_from(["a", "b", "..x", ".y", "models", "ü"]), min_size=1, max_size=6)


@given(PARTS, PARTS)
def test_a_way_leads_where_it_was_measured_to(start: list[str], end: list[str]) -> None:
    if start[: len(end)] == end or end[: len(start)] == start:
        return
    for root in ("s3://bucket/", "/nowhere/"):
        begin, goal = root + "/".join(start), root + "/".join(end)
        way = way_between(begin, goal)
        assert WAY.fullmatch(way)
        assert follow_way(begin, way) == goal


@given(st.text(max_size=40))
def test_no_other_text_is_a_way(text: str) -> None:
    if WAY.fullmatch(text):
        steps = text.split("/")
        downs = steps[steps.count("..") :]
        assert steps[0] == ".."
        assert downs
        assert not {"", ".", ".."} & set(downs)
        assert not any(ord(character) < 32 for character in text)


def test_both_stores_move_together(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    shared = Store.create(str(tmp_path / "here/shared"))
    publish_lineage(shared, 1)
    borrower = Store.create(str(tmp_path / "here/acme"), alternates=[shared.location])
    publish_lineage(borrower, 1)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    moved = Store.open(str(tmp_path / "there/acme"))
    assert moved.verify().problems == ()
    shutil.copytree(borrower.location, tmp_path / "alone/acme")
    alone = Store.open(str(tmp_path / "alone/acme"))
    problem = alone.verify().problems[0]
    assert f"there is no store at {tmp_path}/alone/shared" in problem
    assert "`dne-store copy --to STORE` makes a whole copy" in problem


def test_a_link_to_a_store_is_that_store(tmp_path: Path) -> None:
    shared = Store.create(str(tmp_path / "deep/down/shared"))
    publish_lineage(shared, 1)
    (tmp_path / "link").symlink_to(shared.location)
    borrower = Store.create(str(tmp_path / "acme"), alternates=[str(tmp_path / "link")])
    publish_lineage(borrower, 1)
    assert borrower.alternates.named[0].location == "../deep/down/shared"
    (tmp_path / "link").unlink()
    assert Store.open(borrower.location).verify().problems == ()


def test_a_borrower_holds_no_room_back_where_its_alternate_does(tmp_path: Path) -> None:
    shared = Store.create(str(tmp_path / "shared"))
    borrower = Store.create(str(tmp_path / "acme"), alternates=[shared.location])
    assert borrower.objects.list_names("reserve") == ()
    shared.objects.delete("reserve/room")
    Store.create(borrower.location)
    assert borrower.objects.list_names("reserve") == ("reserve/room",)


@pytest.mark.long
def test_every_command_works_on_a_store_that_borrows(
    place: Place, tmp_path: Path, capsys: Capture
) -> None:
    shared = Store.create(place("shared"))
    publish_tiny(shared)
    where = ("--store", place("acme"))
    assert json_of(capsys, "init", *where, "--alternate", shared.location)["versions"] == 0
    store = Store.open(place("acme"))
    first = publish_tiny(store)
    publish_tiny(store, parent=first, tasks=[("digits", ["0"])], seed=1)
    assert experts_in(store) == {store.manifest(2).experts[1].sha256}
    for words in (
        "promote 1", "promote 2", "rollback", "resume", "history", "list", "show 2", "diff 1 2",
        "verify", "verify 1", "storage", "gc", "gc --sweep", "borrowers", "inbox list",
        f"export-onnx 2 --out {tmp_path}/onnx", f"copy --to {place('whole')}", "mend-channel",
        "rename-class a c", "retire-class c", "promote 2", "delete 3", "gc --sweep --grace 0",
        "gc --sweep --grace 0", "forget --class a", "verify",
    ):  # fmt: skip
        assert main([*words.split(), *where]) == 0, (words, capsys.readouterr().err)
    assert experts_in(store) == {store.manifest(2).experts[1].sha256}
    assert Store.open(place("whole")).verify().problems == ()
    assert experts_in(Store.open(place("whole"))) == {
        ref.sha256 for ref in store.manifest(2).experts
    }


def test_init_and_borrowers_tell_people_and_scripts(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert json_of(capsys, "init", "--store", "shared")["alternates"] == []
    asked = ("init", "--store", "acme", "--alternate", "shared")
    made = json_of(capsys, *asked)
    assert made["alternates"] == ["../shared"]
    assert json_of(capsys, *asked) == made
    (found,) = json_of(capsys, "borrowers", "--store", "shared")["borrowers"]
    assert (found["id"], found["state"]) == (made["id"], "borrows")
    assert main(["borrowers", "--store", "shared", "--release", made["id"]]) == 1
    assert "is not released" in capsys.readouterr().err
    shutil.rmtree("acme")
    assert json_of(capsys, "borrowers", "--store", "shared", "--release", made["id"]) == {
        "released": made["id"]
    }
    assert main(["init", "--store", "other", "--alternate", "nothere"]) == 1
    assert "there is no store at nothere" in capsys.readouterr().err
    assert not Path("other").exists()
