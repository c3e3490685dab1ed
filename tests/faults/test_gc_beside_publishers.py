"""Housekeeping beside publishers and readers: whatever the order of their operations, no version
ever names a shard that is not there."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from model_store.backends.base import Objects
from model_store.errors import DataRejected, ShardForgotten, ShardMissing, StoreError
from model_store.maintenance.forget import delete_version, forget_class
from model_store.maintenance.gc import collect_garbage
from model_store.records import gc_marks as condemn
from model_store.records.gc_marks import SWEEP_WINDOW_S
from model_store.store.publish import EXPIRY_S
from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.faults.interleaved import Actor, JudgedObjects, is_there
from tests.model_store.drafts import Prepared, prepare

pytestmark = pytest.mark.faults

GRACE_S = 100.0
MOST_STEPS = 150
SEEDS = [0, 1]
ACTORS = [
    "publisher", "publisher", "publisher", "first publisher",
    "sweeper", "sweeper", "sweeper", "deleter", "reader", "forgetter",
]  # fmt: skip
TIMES = st.sampled_from([1, 1, 2, 3, 5, 8, 13, 21])  # a pause may be short or long for the others
EVENTS = st.sampled_from([*["step"] * 20, "time", "kill"])


class Housekeeping(RuleBasedStateMachine):
    """Few different drafts, so that what was swept or is being swept is wanted again."""

    done: ClassVar[Counter[str]] = Counter()
    seed: ClassVar[Callable[[], None]]
    """Called for every example, so that each can be replayed."""

    def __init__(self) -> None:
        super().__init__()
        type(self).seed()
        self.objects = JudgedObjects()
        self.actors: list[Actor] = []
        self.misread: list[str] = []
        self.refused: list[str] = []
        store = Store.create("models", objects=self.objects)
        firsts = [prepare(seed=seed, images=1) for seed in SEEDS]
        parent = firsts[0].publish(store)
        store.promote(1, channel="production", actor="a", reason="")
        self.drafts = {
            "first publisher": firsts,
            "publisher": [prepare(parent=parent, seed=seed, images=1) for seed in SEEDS],
        }

    @rule(
        entering=st.lists(
            st.tuples(st.sampled_from(ACTORS), st.integers(1, 6)), min_size=1, max_size=3
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
        """A few more come in, and everybody goes on for a while, in any order."""
        if garbage is not None:
            self._leave_something_to_sweep(garbage)
        for who, number in entering:
            self._enter(who, number)
        for event, which, times in events:
            if self.actors:
                self._let_happen(event, self.actors[which % len(self.actors)], times)
                self.actors = [one for one in self.actors if not one.ended]

    def _let_happen(self, event: str, actor: Actor, times: int) -> None:
        if event == "kill":
            actor.kill()
        elif event == "time":
            self._let_time_pass(GRACE_S if times > 2 else SWEEP_WINDOW_S + 1)
        else:
            for _ in range(times):
                self._step(actor)

    def _let_time_pass(self, passed_s: float) -> None:
        """Nobody stands that long between asking for a deletion and its taking place: that is
        what the format assumes."""
        for actor in self.actors:
            while actor.next[0] == "delete" and not actor.ended:
                self._step(actor)
        self.objects.now_s += passed_s

    def _leave_something_to_sweep(self, seed: int) -> None:
        """Shards that nothing names, already condemned, and that the same draft needs again."""
        draft = self._draft("publisher", seed)

        def work(objects: Objects) -> None:
            store = Store.open("models", objects=objects)
            delete_version(store, draft.publish(store).version, actor="a", reason="")
            collect_garbage(store, dry_run=False, grace_s=GRACE_S)

        actor = Actor(self.objects, work)
        for _ in range(MOST_STEPS):
            actor.step()
        actor.kill()  # where it waits for somebody else

    def _enter(self, who: str, number: int) -> None:
        works: dict[str, Callable[[Store], None]] = {
            "sweeper": self._sweep,
            "deleter": lambda store: self._delete(store, number),
            "forgetter": self._forget,
            "reader": lambda store: self._read(store, number),
        }
        if who in self.drafts:
            draft = self._draft(who, number % len(SEEDS))
            works[who] = lambda store: self._publish(store, draft)
        work = works[who]
        self.actors.append(
            Actor(self.objects, lambda objects: work(Store.open("models", objects=objects)))
        )

    # What they do

    def _publish(self, store: Store, draft: Prepared) -> None:
        try:
            made = draft.publish(store)
        except StoreError as error:
            if draft.draft.parent is None:  # it brings all its shards: nobody can stand in its way
                self.refused.append(str(error))
            raise
        self.done["publishes"] += 1
        if draft.draft.parent is None:
            store.promote(made.version, channel="staging", actor="a", reason="")

    def _sweep(self, store: Store) -> None:
        collect_garbage(store, dry_run=False, grace_s=0.0, monotonic_s=lambda: self.objects.now_s)
        self.done["gc runs"] += 1

    def _delete(self, store: Store, number: int) -> None:
        versions = store.versions()
        delete_version(store, versions[-number % len(versions)], actor="a", reason="")
        self.done["deletions"] += 1

    def _forget(self, store: Store) -> None:
        with suppress(DataRejected):  # no version knows the class at the moment
            forget_class(store, "class-1a", actor="a", reason="")

    def _read(self, store: Store, number: int) -> None:
        versions = store.versions()
        version = versions[-number % len(versions)]
        for ref in store.manifest(version).shards:
            try:
                store.read_shard(ref)
            except ShardForgotten:
                continue
            except ShardMissing as error:
                if is_there(self.objects, version):
                    self.misread.append(str(error))
        self.done["reads"] += 1

    @invariant()
    def nothing_is_missing(self) -> None:
        assert self.objects.missing == []
        assert self.misread == []
        assert self.refused == []

    def teardown(self) -> None:
        for actor in self.actors:
            actor.kill()
        self.done["swept"] += self.objects.swept
        self.nothing_is_missing()
        self.objects.now_s += EXPIRY_S + 1
        store = Store.open("models", objects=self.objects)
        for _ in range(4):
            self.objects.now_s += SWEEP_WINDOW_S + 1
            collect_garbage(store, dry_run=False, grace_s=0.0)
        report = store.verify()
        assert (report.problems, report.unused) == ((), ())

    def _step(self, actor: Actor) -> None:
        self.done["steps"] += not actor.ended
        actor.step()

    def _draft(self, who: str, seed: int) -> Prepared:
        made = self.drafts[who][seed]
        fresh = {"transaction": uuid.uuid4().hex}
        return Prepared(made.draft.model_copy(update=fresh), made.shards)


def run_campaign(monkeypatch: pytest.MonkeyPatch, *, examples: int, steps: int) -> Counter[str]:
    numbers = random.Random()
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=numbers.getrandbits(128)))
    monkeypatch.setattr(Housekeeping, "seed", staticmethod(lambda: numbers.seed(7)), raising=False)
    monkeypatch.setattr(condemn, "RESCUE_PAUSE_S", 0.0)
    monkeypatch.setattr(Housekeeping, "done", Counter())
    run_state_machine_as_test(
        Housekeeping,
        settings=settings(
            deadline=None,
            max_examples=examples,
            stateful_step_count=steps,
            phases=[Phase.generate],  # to shrink a history takes minutes, and it is short already
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Housekeeping.done


@pytest.mark.long
def test_gc_beside_publishers_and_readers_takes_nothing_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = run_campaign(monkeypatch, examples=15, steps=10)
    assert done["steps"] > 1000
    assert min(done["publishes"], done["swept"], done["gc runs"], done["reads"]) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gc_beside_publishers_and_readers_in_ten_thousand_steps(
    monkeypatch: pytest.MonkeyPatch, fault_row: AddRow
) -> None:
    done = run_campaign(monkeypatch, examples=100, steps=10)
    assert done["steps"] >= 10_000
    fault_row(
        "gc beside publishers and readers",
        f"stateful: {done['steps']} steps, {done['publishes']} publishes, {done['gc runs']} gc "
        f"runs, {done['deletions']} deletions, {done['swept']} shards swept, {done['reads']} reads",
        "0 missing references",
    )
