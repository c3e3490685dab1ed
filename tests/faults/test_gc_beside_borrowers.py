"""A store that lends sweeps while others begin to borrow: no version of theirs ever names an
expert that is nowhere, whatever the order of the operations."""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from model_store.backends.base import Objects
from model_store.maintenance.forget import delete_version
from model_store.maintenance.gc import collect_garbage
from model_store.records import gc_marks
from model_store.records.gc_marks import SWEEP_WINDOW_S
from model_store.store import alternates
from model_store.store.publish import EXPIRY_S
from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.faults.interleaved import Actor, JudgedObjects
from tests.faults.test_gc_beside_publishers import EVENTS, GRACE_S, MOST_STEPS, TIMES
from tests.model_store.drafts import Prepared, prepare

pytestmark = pytest.mark.faults

LENDER, BORROWERS = "shared", ("acme", "bolt")
SEEDS = [0, 1, 2]
ACTORS = ["borrower", "borrower", "borrower", "publisher", "deleter", "sweeper", "sweeper"]


class Lending(RuleBasedStateMachine):
    done: ClassVar[Counter[str]] = Counter()
    seed: ClassVar[Callable[[], None]]

    def __init__(self) -> None:
        super().__init__()
        type(self).seed()
        self.stores = {name: JudgedObjects() for name in (LENDER, *BORROWERS)}
        self.actors: list[Actor] = []
        self.missing: list[str] = []
        self.drafts = [prepare(seed=seed, images=1) for seed in SEEDS]
        store = Store.create(LENDER, objects=self.stores[LENDER])
        for seed in SEEDS[:2]:
            self._publish(store, seed)
        store.promote(1, channel="production", actor="a", reason="")

    @rule(
        entering=st.lists(
            st.tuples(st.sampled_from(ACTORS), st.integers(0, 5)), min_size=1, max_size=3
        ),
        garbage=st.sampled_from([None, *SEEDS]),
        events=st.lists(st.tuples(EVENTS, st.integers(0, 5), TIMES), min_size=10, max_size=40),
    )
    def go_on(
        self,
        entering: list[tuple[str, int]],
        garbage: int | None,
        events: list[tuple[str, int, int]],
    ) -> None:
        if garbage is not None:
            self._leave_something_to_sweep(garbage)
        for who, number in entering:
            self._enter(who, number)
        for event, which, times in events:
            living = [one for one in self.actors if not one.ended]
            if event == "time":
                self._let_time_pass(GRACE_S if times > 2 else SWEEP_WINDOW_S + 1)
            elif living and event == "kill":
                living[which % len(living)].kill()
            elif living:
                for _ in range(times):
                    self._step(living[which % len(living)])

    def _leave_something_to_sweep(self, seed: int) -> None:
        """An expert that nothing names, already condemned, unless somebody keeps it."""

        def work(objects: Objects) -> None:
            store = self._open(objects)
            version = self._publish(store, seed)
            store.promote(version, channel="production", actor="a", reason="")
            for other in store.versions():
                if (
                    other != version
                    and store.manifest(other).experts == store.manifest(version).experts
                ):
                    delete_version(store, other, actor="a", reason="")
            store.promote(
                self._publish(store, (seed + 1) % len(SEEDS)),
                channel="production",
                actor="a",
                reason="",
            )
            delete_version(store, version, actor="a", reason="")
            collect_garbage(store, dry_run=False, grace_s=0.0)

        actor = Actor(self.stores[LENDER], work)
        for _ in range(MOST_STEPS):
            actor.step()
        actor.kill()  # where it waits for somebody else

    def _enter(self, who: str, number: int) -> None:
        name = BORROWERS[number % 2] if who == "borrower" else LENDER
        work = {
            "borrower": lambda objects: self._borrow(objects, name, number % len(SEEDS)),
            "publisher": lambda objects: self._publish(self._open(objects), number % len(SEEDS)),
            "deleter": lambda objects: self._delete(self._open(objects), number),
            "sweeper": lambda objects: self._sweep(self._open(objects)),
        }[who]
        # Until it waits for its first turn, it has read nothing but the `store.json` of a lender.
        self.actors.append(Actor(self.stores[name], work))

    def _open(self, objects: Objects) -> Store:
        return Store.open(LENDER, objects=objects)

    def _borrow(self, objects: Objects, name: str, seed: int) -> None:
        self._publish(Store.create(name, objects=objects, alternates=[LENDER]), seed)
        self.done["borrowed"] += 1

    def _publish(self, store: Store, seed: int) -> int:
        made = self.drafts[seed]
        fresh = {"transaction": uuid.uuid4().hex}
        self.done["publishes"] += 1
        return Prepared(made.draft.model_copy(update=fresh), made.shards).publish(store).version

    def _delete(self, store: Store, number: int) -> None:
        versions = store.versions()
        delete_version(store, versions[-number % len(versions)], actor="a", reason="")

    def _sweep(self, store: Store) -> None:
        now = self.stores[LENDER]
        collect_garbage(store, dry_run=False, grace_s=0.0, monotonic_s=lambda: now.now_s)
        self.done["gc runs"] += 1

    def _let_time_pass(self, passed_s: float) -> None:
        for actor in self.actors:
            while actor.next[0] == "delete" and not actor.ended:
                self._step(actor)
        for objects in self.stores.values():
            objects.now_s += passed_s

    def _step(self, actor: Actor) -> None:
        self.done["steps"] += not actor.ended
        actor.step()
        lent = self.stores[LENDER].held
        for name in BORROWERS:
            own = self.stores[name]
            own.missing.clear()  # the judge of one store does not know of the other one
            for manifest, shards in own.named.items():
                self.missing += [
                    f"{manifest} of {name} names {shard}"
                    for shard in shards
                    if shard not in own.held and shard not in lent
                ]

    @invariant()
    def nothing_is_missing(self) -> None:
        assert self.missing == []
        assert self.stores[LENDER].missing == []

    def teardown(self) -> None:
        for actor in self.actors:
            actor.kill()
        self.done["swept"] += self.stores[LENDER].swept
        for objects in self.stores.values():
            objects.now_s += EXPIRY_S + 1
        store = self._open(self.stores[LENDER])
        for _ in range(4):
            self._let_time_pass(SWEEP_WINDOW_S + 1)
            collect_garbage(store, dry_run=False, grace_s=0.0)
        self.nothing_is_missing()
        assert store.verify().problems == ()
        for name in BORROWERS:
            if self.stores[name].held.get("store.json"):
                assert Store.open(name, objects=self.stores[name]).verify().problems == ()


def run_campaign(monkeypatch: pytest.MonkeyPatch, *, examples: int) -> Counter[str]:
    numbers = random.Random()
    machine: list[Lending] = []

    class Watched(Lending):
        def __init__(self) -> None:
            machine[:] = [self]
            super().__init__()

    def opened(location: str) -> Objects:
        return _turned(machine[0].stores, machine[0].actors, location)

    monkeypatch.setattr(alternates, "objects_at", opened)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=numbers.getrandbits(128)))
    monkeypatch.setattr(Lending, "seed", staticmethod(lambda: numbers.seed(7)), raising=False)
    monkeypatch.setattr(gc_marks, "RESCUE_PAUSE_S", 0.0)
    monkeypatch.setattr(Lending, "done", Counter())
    run_state_machine_as_test(
        Watched,
        settings=settings(
            deadline=None,
            max_examples=examples,
            stateful_step_count=10,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Lending.done


def test_a_borrower_that_comes_at_any_moment_of_a_sweep_has_its_expert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc_marks, "RESCUE_PAUSE_S", 0.0)
    for moment in range(1000):
        stores = {name: JudgedObjects() for name in (LENDER, "acme")}
        lender = Store.create(LENDER, objects=stores[LENDER])
        _leave_something_to_sweep(lender)
        actors: list[Actor] = []
        monkeypatch.setattr(alternates, "objects_at", partial(_turned, stores, actors))
        sweeper = Actor(stores[LENDER], _sweep_lender)
        actors.append(sweeper)
        for _ in range(moment):
            sweeper.step()
        ended = sweeper.ended
        borrower = Actor(stores["acme"], _borrow_first)
        actors.append(borrower)
        for actor in (borrower, sweeper, borrower):
            for _ in range(MOST_STEPS):
                actor.step()
        assert (sweeper.ended, borrower.ended, borrower.error) == (True, True, None)
        assert Store.open("acme", objects=stores["acme"]).verify().problems == ()
        if ended:
            assert moment > 20
            return


def _leave_something_to_sweep(lender: Store) -> None:
    prepare(images=1).publish(lender)
    prepare(images=1, seed=1).publish(lender)
    lender.promote(2, channel="production", actor="a", reason="")
    delete_version(lender, 1, actor="a", reason="")
    collect_garbage(lender, dry_run=False, grace_s=0.0)


def _sweep_lender(objects: Objects) -> None:
    collect_garbage(
        Store.open(LENDER, objects=objects), dry_run=False, grace_s=0.0, monotonic_s=lambda: 0.0
    )


def _borrow_first(objects: Objects) -> None:
    prepare(images=1).publish(Store.create("acme", objects=objects, alternates=[LENDER]))


def _turned(stores: dict[str, JudgedObjects], actors: list[Actor], location: str) -> Objects:
    """What a location is to whoever asks: an actor at another store, or nobody's turn."""
    objects, here = stores[Path(location).name], threading.current_thread()
    return next((one.at(objects) for one in actors if one.thread is here), objects)


@pytest.mark.long
def test_gc_of_a_lender_beside_those_who_begin_to_borrow(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_campaign(monkeypatch, examples=15)
    assert done["steps"] > 1000
    assert min(done["borrowed"], done["swept"], done["gc runs"]) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gc_of_a_lender_beside_borrowers_in_ten_thousand_steps(
    monkeypatch: pytest.MonkeyPatch, fault_row: AddRow
) -> None:
    done = run_campaign(monkeypatch, examples=100)
    assert done["steps"] >= 10_000
    fault_row(
        "gc of a store that lends, beside borrowers",
        f"stateful: {done['steps']} steps, {done['borrowed']} borrowers published, "
        f"{done['gc runs']} gc runs, {done['swept']} shards swept",
        "0 missing references",
    )
