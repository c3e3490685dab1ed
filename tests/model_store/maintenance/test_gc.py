from __future__ import annotations

import threading

import pytest

from model_store.backends.base import Objects
from model_store.errors import OutcomeUnknown, StoreError, WriteFailed
from model_store.layout import record_name, run_name, shard_name, version_name
from model_store.maintenance.copy import copy_store
from model_store.maintenance.forget import delete_version
from model_store.maintenance.gc import GRACE_S, GcReport, collect_garbage
from model_store.records import gc_marks as condemn
from model_store.records.gc_marks import SWEEP_WINDOW_S, decide, list_condemned, rescue
from model_store.records.sealing import create_record
from model_store.store.publish import EXPIRY_S, Announcement, announce, announced
from model_store.store.store import Store
from tests.model_store.backends import ClockedObjects, MemoryObjects, WatchedObjects
from tests.model_store.drafts import Prepared, prepare, publish_lineage


@pytest.fixture
def clocked() -> ClockedObjects:
    return ClockedObjects()


@pytest.fixture
def watched(clocked: ClockedObjects) -> WatchedObjects:
    return WatchedObjects(clocked)


@pytest.fixture
def store(watched: WatchedObjects) -> Store:
    """Versions 1 and 2, and three shards that only a deleted version named."""
    store = Store.create("models", objects=watched)
    publish_lineage(store, 2)
    delete_version(store, _third(store).publish(store).version, actor="a", reason="")
    return store


def _third(store: Store) -> Prepared:
    return prepare(parent=store.manifest(2), seed=2, images=1)


def _unnamed(store: Store) -> list[str]:
    return sorted(shard_name(sha256) for sha256 in _third(store).shards)


def _sweep(store: Store, *, grace_s: float = GRACE_S) -> GcReport:
    return collect_garbage(store, dry_run=False, grace_s=grace_s)


def test_a_dry_run_changes_nothing_and_says_what_would_be_done(
    store: Store, clocked: ClockedObjects
) -> None:
    before = dict(clocked.held)
    report = collect_garbage(store, dry_run=True)
    assert sorted(entry.name for entry in report.condemned) == _unnamed(store)
    assert report.swept == ()
    assert clocked.held == before


def test_one_run_condemns_and_a_later_one_sweeps(store: Store, clocked: ClockedObjects) -> None:
    unnamed = _unnamed(store)
    assert sorted(entry.name for entry in _sweep(store).condemned) == unnamed
    assert set(unnamed) <= set(clocked.held)
    clocked.now_s += GRACE_S + 1
    report = _sweep(store)
    assert sorted(entry.name for entry in report.swept) == unnamed
    assert not set(unnamed) & set(clocked.held)
    verified = store.verify()
    assert (verified.problems, verified.unused) == ((), ())
    assert not [name for name in clocked.held if name.startswith(("condemned/", "clock/"))]


def test_without_a_grace_period_it_still_takes_two_runs(store: Store) -> None:
    assert _sweep(store, grace_s=0).swept == ()
    assert len(_sweep(store, grace_s=0).swept) == len(_unnamed(store))


def test_the_grace_period_is_counted_by_the_clock_of_the_store(
    store: Store, clocked: ClockedObjects
) -> None:
    clocked.now_s = 10.0  # decades before ours
    _sweep(store)
    clocked.now_s += GRACE_S - 1
    report = _sweep(store)
    assert report.swept == ()
    assert sorted(entry.name for entry in report.waiting) == _unnamed(store)
    clocked.now_s += 2
    assert len(_sweep(store).swept) == len(_unnamed(store))


def test_what_a_version_names_is_never_condemned(store: Store, clocked: ClockedObjects) -> None:
    named = {shard_name(ref.sha256) for n in (1, 2) for ref in store.manifest(n).shards}
    for _ in range(3):
        report = _sweep(store, grace_s=0)
        assert not named & {entry.name for entry in (*report.condemned, *report.swept)}
    assert named <= set(clocked.held)


def test_what_a_run_has_announced_is_kept_until_the_announcement_expires(
    store: Store, clocked: ClockedObjects
) -> None:
    store.announce("a" * 32, parent=2, digests=list(_third(store).shards))
    for _ in range(3):
        clocked.now_s += GRACE_S
        report = _sweep(store)
        assert (report.condemned, report.swept) == ((), ())
    clocked.now_s += EXPIRY_S
    assert run_name("a" * 32, 1) in _sweep(store).leftovers
    clocked.now_s += GRACE_S
    assert len(_sweep(store).swept) == len(_unnamed(store))


def test_a_run_that_is_withdrawn_protects_nothing_any_more(store: Store) -> None:
    store.announce("a" * 32, parent=2, digests=list(_third(store).shards))
    store.announce("a" * 32, parent=2, digests=[])  # once more, later in the run
    store.withdraw("a" * 32)
    assert len(_sweep(store).condemned) == len(_unnamed(store))


def test_a_publish_ends_all_announcements_of_its_run(store: Store, clocked: ClockedObjects) -> None:
    prepared = _third(store)
    digests = [ref.sha256 for ref in store.manifest(2).shards]
    store.announce(prepared.draft.transaction, parent=2, digests=digests)
    prepared.publish(store)
    assert not [name for name in clocked.held if name.startswith("runs/")]


def test_the_announcement_left_by_a_publisher_that_died_is_ended_by_its_version(
    store: Store, clocked: ClockedObjects
) -> None:
    manifest = store.manifest(2)
    announce(clocked, manifest.transaction, parent=1, digests=[])
    assert run_name(manifest.transaction, 1) in _sweep(store).leftovers
    assert run_name(manifest.transaction, 1) not in clocked.held


def test_an_announcement_stays_when_nobody_knows_whether_the_version_is_there(
    clocked: ClockedObjects,
) -> None:
    for error, stays in ((OutcomeUnknown("?"), True), (WriteFailed("no"), False)):
        with (
            pytest.raises(type(error)),
            announced(clocked, "b" * 32, parent=None, digests=["c" * 64]),
        ):
            raise error
        assert (run_name("b" * 32, 1) in clocked.held) is stays
        clocked.delete(run_name("b" * 32, 1))


def test_what_was_condemned_and_is_published_again_is_released(
    store: Store, clocked: ClockedObjects
) -> None:
    _sweep(store)
    manifest = _third(store).publish(store)
    clocked.now_s += GRACE_S + 1
    assert _sweep(store).swept == ()
    assert list_condemned(clocked).marks == []
    delete_version(store, manifest.version, actor="a", reason="")
    assert _sweep(store).swept == ()  # a fresh grace period, not the rest of the old one
    assert store.verify().problems == ()


def test_marks_are_listed_before_runs_and_runs_before_versions(
    store: Store, watched: WatchedObjects
) -> None:
    """The other way round a publisher could slip through between two listings."""
    watched.calls.clear()
    collect_garbage(store, dry_run=True)
    listed = [name for name in watched.names("list") if name in ("condemned", "runs", "versions")]
    assert listed[:3] == ["condemned", "runs", "versions"]
    assert listed.count("condemned") == listed.count("runs") == 1


def test_a_publisher_announces_before_it_looks_for_marks(
    store: Store, watched: WatchedObjects
) -> None:
    prepared = _third(store)
    watched.calls.clear()
    prepared.publish(store)
    calls = watched.calls
    announced_at = calls.index(("create", run_name(prepared.draft.transaction, 1)))
    looked_at = calls.index(("list", "condemned"))
    first_shard = min(at for at, (_, name) in enumerate(calls) if name.startswith("shards/"))
    assert announced_at < looked_at < first_shard


def test_a_mark_is_cleared_before_its_verdict(store: Store, watched: WatchedObjects) -> None:
    """A mark without verdict could be decided a second time, by a sweep that is slow."""
    _sweep(store, grace_s=0)
    (mark, *_) = list_condemned(watched).marks
    _sweep(store, grace_s=0)
    deleted = watched.names("delete")
    assert deleted.index(mark.name) < deleted.index(mark.verdict_name)
    assert deleted.index(shard_name(mark.sha256)) < deleted.index(mark.name)


def test_a_sweep_that_finds_a_mark_decided_and_cleared_takes_nothing(
    store: Store, watched: WatchedObjects, clocked: ClockedObjects
) -> None:
    _sweep(store, grace_s=0)
    marks = list_condemned(clocked).marks

    def meanwhile(verb: str, name: str) -> None:
        """Another run keeps and clears every mark, just before we decide the first one."""
        if verb == "create" and name.endswith(".verdict.json"):
            watched.before = lambda verb, name: None
            for mark in marks:
                decide(clocked, mark, "keep")
                condemn.clear(clocked, mark)

    watched.before = meanwhile
    assert _sweep(store, grace_s=0).swept == ()
    assert set(_unnamed(store)) <= set(clocked.held)
    assert list_condemned(clocked).orphans == []


def test_a_publisher_waits_for_a_sweep_that_has_decided(
    store: Store, watched: WatchedObjects, clocked: ClockedObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled = threading.Event()
    polls: list[bool] = []
    monkeypatch.setattr(condemn, "RESCUE_PAUSE_S", 0.001)
    prepared = _third(store)

    def notice(verb: str, name: str) -> None:
        polls.append((verb, name) == ("list", "condemned"))
        if sum(polls) == 3:
            polled.set()

    other = Store.open("models", objects=WatchedObjects(clocked, before=notice))
    publisher = threading.Thread(target=prepared.publish, args=(other,))
    visible: list[list[int]] = []

    def meanwhile(verb: str, name: str) -> None:
        if verb == "delete" and name.startswith("shards/") and not polled.is_set():
            publisher.start()
            assert polled.wait(5)
            visible.append(store.versions())

    _sweep(store, grace_s=0)
    watched.before = meanwhile
    assert _sweep(store, grace_s=0).swept
    publisher.join(10)
    assert visible == [[1, 2]]
    assert store.versions() == [1, 2, 4]
    assert store.verify().problems == ()


def test_a_mark_that_a_sweep_has_decided_is_not_cleared_by_another_run(
    store: Store, watched: WatchedObjects, clocked: ClockedObjects
) -> None:
    """Else a publisher would not see that its shard is about to go."""
    _sweep(store, grace_s=0)
    shards = tuple(sorted(_third(store).shards))
    needed = Announcement(transaction="a" * 32, parent=None, shards=shards, id="b" * 32)
    left: list[set[str]] = []

    def meanwhile(verb: str, name: str) -> None:
        if verb == "delete" and name.startswith("shards/") and not left:
            create_record(clocked, run_name("a" * 32, 1), needed)
            _sweep(Store.open("models", objects=clocked), grace_s=0)
            left.append({shard_name(mark.sha256) for mark in list_condemned(clocked).marks})
            assert name in left[0]

    watched.before = meanwhile
    _sweep(store, grace_s=0)
    assert left


def test_a_run_does_not_clear_a_mark_that_a_sweep_decides_while_it_looks(
    store: Store, watched: WatchedObjects, clocked: ClockedObjects
) -> None:
    _sweep(store, grace_s=0)
    (mark, *others) = list_condemned(clocked).marks
    store.announce("a" * 32, parent=None, digests=[other.sha256 for other in others])
    needed = Announcement(transaction="b" * 32, parent=None, shards=(mark.sha256,), id="b" * 32)
    create_record(clocked, run_name("b" * 32, 1), needed)

    def meanwhile(verb: str, name: str) -> None:
        if (verb, name) == ("create", mark.verdict_name):
            watched.before = lambda verb, name: None
            assert decide(clocked, mark, "sweep")

    watched.before = meanwhile
    _sweep(store, grace_s=0)
    assert [left.sha256 for left in list_condemned(clocked).marks] == [mark.sha256]


def test_the_verdict_of_a_sweep_that_died_is_void_after_a_while(
    store: Store, clocked: ClockedObjects
) -> None:
    _sweep(store)
    marks = list_condemned(clocked).marks
    for mark in marks:
        assert decide(clocked, mark, "sweep")
    clocked.now_s += SWEEP_WINDOW_S + 1
    rescue(clocked, {mark.sha256 for mark in marks}, sleep=lambda s: pytest.fail("waits"))
    assert _sweep(store, grace_s=0).swept == ()  # the old marks go, new ones come
    assert len(_sweep(store, grace_s=0).swept) == len(marks)


def test_a_sweep_that_was_held_up_takes_nothing(store: Store, clocked: ClockedObjects) -> None:
    _sweep(store, grace_s=0)
    ticks = iter(range(0, 100_000, int(SWEEP_WINDOW_S)))
    report = collect_garbage(
        store, dry_run=False, grace_s=0, monotonic_s=lambda: float(next(ticks))
    )
    assert report.swept == ()
    assert set(_unnamed(store)) <= set(clocked.held)


@pytest.mark.parametrize(
    "name", [version_name(1), version_name(2), record_name("production", 2), "runs/" + "a" * 32]
)
@pytest.mark.parametrize("damage", ["garbage", "lost"])
def test_in_a_damaged_store_nothing_is_condemned_and_nothing_swept(
    store: Store, clocked: ClockedObjects, name: str, damage: str
) -> None:
    _sweep(store, grace_s=0)
    if name.startswith("runs/"):
        name += ".json"
        damage = "garbage"
    clocked.delete(name)
    if damage == "garbage":
        clocked.create(name, b"{}")
    if damage == "lost" and name.startswith("channels/"):
        clocked.delete(version_name(2))
        clocked.create(name, b"{}")
    before = dict(clocked.held)
    with pytest.raises(StoreError):
        _sweep(store, grace_s=0)
    assert clocked.held == before


def test_leftovers_of_processes_that_died_go_after_a_day(
    store: Store, clocked: ClockedObjects
) -> None:
    clocked.create("tmp/" + "a" * 32, b"half")
    clocked.create("clock/" + "b" * 32, b"")
    job = "jobs/20261117t120000000-0123456789ab"
    clocked.create(f"{job}/beat.00000001.00000007.json", b"a worker lived")
    clocked.create(f"{job}/claim.00000001.json", b"stays")
    assert _sweep(store).leftovers == ()
    clocked.now_s += 25 * 3600
    beat = f"{job}/beat.00000001.00000007.json"
    assert sorted(_sweep(store).leftovers) == ["clock/" + "b" * 32, beat, "tmp/" + "a" * 32]


def test_every_backend_is_swept(objects: Objects) -> None:
    store = Store.create("models", objects=objects)
    publish_lineage(store, 1)
    branch = prepare(parent=store.manifest(1), seed=1).publish(store)
    delete_version(store, branch.version, actor="a", reason="")
    _sweep(store, grace_s=0)
    assert len(_sweep(store, grace_s=0).swept) == 4
    report = store.verify()
    assert (report.problems, report.unused) == ((), ())
    copy = Store.create("copy", objects=MemoryObjects())
    copy_store(store, copy)
    assert copy.manifest(1) == store.manifest(1)
    assert copy.is_deleted(2)
