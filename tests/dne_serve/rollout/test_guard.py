from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import httpx
import pytest

from dne_serve.cli import main
from dne_serve.engines.base import Answers, Query, Resident
from dne_serve.engines.torch_engine import TorchEngine
from dne_serve.errors import (
    DecoderUnavailable,
    Malformed,
    ModelUnusable,
    NotEnoughMemory,
    QueueFull,
    WaitedTooLong,
)
from dne_serve.rollout.canary import CanaryAndShadow
from dne_serve.rollout.channel import ChannelMove, Mover
from dne_serve.rollout.guard import CanaryWatch, Guard
from dne_serve.rollout.loaded_versions import LoadedVersions
from dne_serve.setting_values import parse_canary, parse_guard
from dne_serve.settings import load_settings
from model_store.errors import (
    ChannelMoved,
    ImageRejected,
    ShardCorrupt,
    StoreError,
    WrongUsage,
)
from model_store.records.channel import ChannelRecord, Mode
from model_store.records.manifest import Manifest
from model_store.records.quality import Unknown
from model_store.store.store import Store
from tests.abuse.images import flat
from tests.dne_serve.fake_engine import Clock
from tests.dne_serve.observe.made_up import answered, failed, logits, resident
from tests.live_server import Live, live_server, png, wait_for
from tests.tiny_versions import promote, publish_tiny


class FakeMover(Mover):
    """Remembers what it was asked; fails first with what is in `faults`."""

    def __init__(self, *faults: Exception) -> None:
        self.asked: list[tuple[str, int | None]] = []
        self.faults = list(faults)

    def rollback(
        self, *, to: int | None, actor: str, reason: str, after: int | None = None
    ) -> ChannelMove:
        if self.faults:
            raise self.faults.pop(0)
        self.asked.append((reason, after))
        moved = record(target=1, number=(after or 0) + 1, mode="pin")
        return ChannelMove(record=moved, resident=resident(1))


def record(*, target: int = 2, number: int = 5, mode: Mode = "follow") -> ChannelRecord:
    return ChannelRecord(
        channel="production",
        number=number,
        target=target,
        target_digest="ab" * 32,
        mode=mode,
        actor="tests",
        reason="",
        time="2020-01-01T00:00:00.000000Z",
        transaction="ab" * 16,
    )


def guard_of(store: FakeMover, clock: Clock, *rules: str, least: int = 10) -> Guard:
    guard = Guard(
        store,
        rules=parse_guard(rules).rules,
        channel="production",
        actor="guard",
        window_s=60,
        least=least,
        clock=clock,
    )
    guard.serving(record(target=1, number=4))  # what the server found when it started
    return guard


def ask(guard: Guard, version: int, *, error: Exception | None = None, times: int = 1) -> None:
    asked = resident(version)
    event = answered(asked, logits(1, 0, 0)) if error is None else failed(asked, error)
    for _ in range(times):
        guard.answered(event)


def settled(guard: Guard) -> None:
    if guard._returning is not None:
        guard._returning.join()


@pytest.mark.parametrize("text", ["errors>1%", "unknown > 30 %", "errors>0.05%", "errors>0%"])
def test_a_rule_is_what_is_bad_and_its_share(text: str) -> None:
    [rule] = parse_guard([text]).rules
    assert rule.what in text
    assert f"{100 * rule.share:g}" in text


@pytest.mark.parametrize("text", ["errors", "errors>1", "errors<1%", "late>1%", "errors>200%", ">"])
def test_what_is_no_rule_is_wrong_usage(text: str) -> None:
    with pytest.raises(WrongUsage, match="errors>1%"):
        load_settings(guard=text)


def test_guards_may_be_given_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def caught(settings: object, *, as_json: bool) -> int:
        given.append(settings.guard)  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr("dne_serve.cli.serve", caught)
    assert main(["--guard", "errors>1%", "--guard", "unknown>30%"]) == 0
    assert given == ["errors>1%,unknown>30%"]


def test_errors_over_the_share_return_the_channel_once_and_say_why() -> None:
    store, clock = FakeMover(), Clock()
    guard = guard_of(store, clock, "errors>10%")
    guard.serving(record())
    ask(guard, 2, times=18)
    ask(guard, 2, error=RuntimeError(), times=2)
    assert store.asked == []
    clock.now = 12
    ask(guard, 2, error=RuntimeError(), times=5)
    settled(guard)
    [(reason, after)] = store.asked
    assert reason.startswith("guard errors>10%: 3 of 21 requests failed (14.3 %) within 12 s of")
    assert reason.endswith("version 2")
    assert after == 5


def test_unknown_images_over_the_share_return_the_channel() -> None:
    store, clock = FakeMover(), Clock()
    guard = guard_of(store, clock, "errors>1%", "unknown>30%")
    guard.serving(record())
    guard.answered(answered(resident(2), *[logits(1, 0, 0)] * 20, unknown=6))
    assert store.asked == []
    guard.answered(answered(resident(2), logits(1, 0, 0), unknown=1))
    settled(guard)
    assert [reason[:40] for reason, _ in store.asked] == [
        "guard unknown>30%: 7 of 21 images were u"
    ]


def test_a_few_say_nothing() -> None:
    store, clock = FakeMover(), Clock()
    guard = guard_of(store, clock, "errors>1%", least=10)
    guard.serving(record())
    ask(guard, 2, error=RuntimeError(), times=9)
    settled(guard)
    assert store.asked == []
    ask(guard, 2, error=RuntimeError())
    settled(guard)
    assert len(store.asked) == 1


def test_after_the_window_nothing_is_returned() -> None:
    store, clock = FakeMover(), Clock()
    guard = guard_of(store, clock, "errors>1%")
    guard.serving(record())
    clock.now = 61
    ask(guard, 2, error=RuntimeError(), times=50)
    settled(guard)
    assert store.asked == []


def test_only_the_version_that_was_promoted_is_watched() -> None:
    store, clock = FakeMover(), Clock()
    guard = guard_of(store, clock, "errors>1%")
    ask(guard, 1, error=RuntimeError(), times=50)  # found at the start, promoted long ago
    guard.serving(record())
    ask(guard, 1, error=RuntimeError(), times=50)
    guard.serving(record(mode="pin"))  # a rollback
    ask(guard, 2, error=RuntimeError(), times=50)
    settled(guard)
    assert store.asked == []


@pytest.mark.parametrize(
    "error", [Malformed("x"), ImageRejected("x"), QueueFull("x"), WaitedTooLong("x")]
)
def test_what_clients_do_wrong_and_want_of_room_are_no_errors(error: Exception) -> None:
    store, clock = FakeMover(), Clock()
    guard = guard_of(store, clock, "errors>1%")
    guard.serving(record())
    ask(guard, 2, error=error, times=50)
    settled(guard)
    assert store.asked == []
    ask(guard, 2, error=ModelUnusable("not finite"), times=10)
    settled(guard)
    assert len(store.asked) == 1


def test_a_store_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dne_serve.rollout.guard.RETRY_S", 0.01)
    store, clock = FakeMover(StoreError("away"), OSError("away")), Clock()
    guard = guard_of(store, clock, "errors>1%")
    guard.serving(record())
    ask(guard, 2, error=RuntimeError(), times=10)
    settled(guard)
    assert len(store.asked) == 1


def test_a_channel_that_somebody_moved_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    store, clock = FakeMover(ChannelMoved("someone was faster")), Clock()
    guard = guard_of(store, clock, "errors>1%")
    guard.serving(record())
    ask(guard, 2, error=RuntimeError(), times=10)
    settled(guard)
    assert store.asked == []
    assert "leaves channel production alone" in caplog.text


def test_two_guards_return_the_channel_once(store: Store) -> None:
    """Two servers follow one channel: the second must not go back a version further."""
    versions = [publish_tiny(store)]
    versions.append(publish_tiny(store, tasks=[("x", ["x"])], parent=versions[0], seed=1))
    versions.append(publish_tiny(store, tasks=[("y", ["y"])], parent=versions[1], seed=2))
    for version in versions:
        promote(store, version)
    head = store.head("production")
    assert head is not None
    store.rollback(channel="production", to=None, actor="one", reason="", after=head.number)
    with pytest.raises(ChannelMoved):
        store.rollback(channel="production", to=None, actor="two", reason="", after=head.number)
    now = store.head("production")
    assert now is not None
    assert (now.target, now.number, now.actor) == (2, head.number + 1, "one")


class Failing(TorchEngine):
    """Cannot run version 2, once it was told so."""

    def __init__(self) -> None:
        super().__init__(device="cpu", threads=1)
        self.fails = threading.Event()

    def run(self, widest: Resident, queries: Sequence[Query]) -> Sequence[Answers | Exception]:
        if widest.version == 2 and self.fails.is_set():
            raise RuntimeError("a test said so")
        return super().run(widest, queries)


@pytest.fixture
def failing(store: Store, letters: Manifest) -> Iterator[tuple[Live, Failing]]:
    engine = Failing()
    rules = "errors>20%, unknown>50%"
    with live_server(Path(store.location), engine=engine, guard=rules, guard_least=10) as live:
        live.wait_until_ready()
        yield live, engine


def test_a_version_that_fails_after_its_promotion_is_taken_back(
    failing: tuple[Live, Failing], store: Store, letters: Manifest
) -> None:
    live, engine = failing
    promote(store, publish_tiny(store, tasks=[("x", ["x"])], parent=letters, seed=1))
    live.wait_until_serving(2)
    for _ in range(20):
        assert live.predict(png()).status_code == 200
    engine.fails.set()
    statuses = [live.predict(png()).status_code for _ in range(6)]
    assert 500 in statuses
    live.wait_until_serving(1)
    head = store.head("production")
    assert head is not None
    assert (head.target, head.mode) == (1, "pin")
    assert head.reason.startswith("guard errors>20%: ")
    assert head.actor.startswith("guard:")
    assert live.predict(png()).json()["version"] == 1
    wait_for(lambda: live.metric("dne_guard_returns_total") == 1)


def test_a_version_that_knows_nothing_is_taken_back(
    failing: tuple[Live, Failing], store: Store, letters: Manifest
) -> None:
    live, _ = failing
    strange = Unknown(score="max-logit", threshold=1e9, rate=0.05, images=20)
    tasks = [("x", ["x"])]
    promote(store, publish_tiny(store, tasks=tasks, parent=letters, seed=1, unknown=strange))
    live.wait_until_serving(2)
    live.predict(*map(png, range(12)))
    live.wait_until_serving(1)
    head = store.head("production")
    assert head is not None
    assert "12 of 12 images were unknown (100.0 %)" in head.reason


@pytest.mark.long
def test_processes_that_cannot_decode_are_no_fault_of_the_version(
    failing: tuple[Live, Failing],
    store: Store,
    letters: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live, _ = failing
    promote(store, publish_tiny(store, tasks=[("x", ["x"])], parent=letters, seed=1))
    live.wait_until_serving(2)
    with monkeypatch.context() as patched:
        patched.setattr("dne_serve.inference.decode_worker.__name__", "dne_serve.no_such_module")
        answers = [live.predict(flat(1001, 1000)) for _ in range(12)]
    assert live.predict(flat(1001, 1000)).status_code == 200
    answers.append(killed_while_it_decodes(live))
    assert [answer.status_code for answer in answers] == [503] * 13
    assert all(answer.headers["retry-after"] for answer in answers)
    head = store.head("production")
    assert head is not None
    assert (head.target, head.mode) == (2, "follow")
    assert live.predict(png()).json()["version"] == 2


def killed_while_it_decodes(live: Live) -> httpx.Response:
    """The answer for a large image whose process is killed, as when memory runs out."""
    processes = live.serving.shared.decoder.large.processes.queue
    [pid] = [one._process.pid for one in processes if one._process is not None]
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(live.predict, flat(1001, 1000))
        wait_for(lambda: len(processes) == 1)  # of two, the other is in use
        os.kill(pid, signal.SIGKILL)
        return answer.result()


def test_only_faults_of_the_engine_count() -> None:
    store, clock = FakeMover(), Clock()
    guard = guard_of(store, clock, "errors>1%")
    guard.serving(record())
    for error in (
        DecoderUnavailable("no process"),
        StoreError("away"),
        ShardCorrupt("ab" * 32, "torn"),
        NotEnoughMemory("full"),
        ImageRejected("no image"),
    ):
        ask(guard, 2, error=error, times=50)
    settled(guard)
    assert store.asked == []
    ask(guard, 2, error=ModelUnusable("not finite"), times=50)
    settled(guard)
    assert len(store.asked) == 1


def test_a_guard_without_rules_watches_nothing(live: Live) -> None:
    assert live.serving._guard._watch is None


# A canary that rises


class PromotingMover(FakeMover):
    def promote(self, to: int, *, actor: str, reason: str, after: int | None = None) -> ChannelMove:
        if self.faults:
            raise self.faults.pop(0)
        self.asked.append((reason, after))
        moved = record(target=to, number=(after or 0) + 1)
        return ChannelMove(record=moved, resident=resident(to))


def canary_of(
    mover: FakeMover, *rules: str, mode: Mode = "follow", text: str = "2=20%,promote=10"
) -> tuple[CanaryWatch, CanaryAndShadow]:
    nothing = cast(LoadedVersions, None)  # requests are noted here, and not answered
    trial = CanaryAndShadow(parse_canary(text.split(",")).canary, None, loaded=nothing)
    watch = CanaryWatch(
        mover,
        trial=trial,
        served=lambda: record(target=1, number=4, mode=mode),
        rules=parse_guard(rules).rules,
        channel="production",
        actor="canary",
        least=10,
    )
    return watch, trial


def answer(watch: CanaryWatch, *, times: int, error: Exception | None = None) -> None:
    asked = resident(2)
    event = answered(asked, logits(1, 0, 0)) if error is None else failed(asked, error)
    for _ in range(times):
        watch.answered(replace(event, by="canary"))


def ended(watch: CanaryWatch) -> None:
    if watch._promoting is not None:
        watch._promoting.join()


def test_a_canary_rises_by_doubling_and_is_promoted_in_the_end() -> None:
    mover = PromotingMover()
    watch, trial = canary_of(mover, "errors>10%")
    shares = []
    for _ in range(3):
        shares.append(trial.share)
        answer(watch, times=10)
    ended(watch)
    assert shares == [0.2, 0.4, 0.8]
    assert mover.asked == [("canary: 30 requests, 0 failed, 0 of 30 images unknown", 4)]
    assert trial.share == 0  # after a rollback of the channel it must not answer again
    answer(watch, times=100)
    assert len(mover.asked) == 1


def test_a_canary_that_breaks_a_rule_answers_nobody_any_more() -> None:
    mover = PromotingMover()
    watch, trial = canary_of(mover, "errors>10%")
    answer(watch, times=8)
    answer(watch, times=2, error=ModelUnusable("it gives no numbers"))
    assert trial.share == 0
    assert trial.ready("canary") is None
    answer(watch, times=100)
    ended(watch)
    assert mover.asked == []


def test_requests_that_the_canary_did_not_answer_do_not_raise_it() -> None:
    watch, trial = canary_of(PromotingMover(), "errors>10%")
    for by in ("served", "asked"):
        watch.answered(replace(answered(resident(2), logits(1, 0, 0)), by=by))
    answer(watch, times=9, error=QueueFull("full"))
    assert trial.share == 0.2


def test_a_canary_is_not_promoted_over_a_rollback_or_another_move() -> None:
    pinned = PromotingMover()
    watch, _ = canary_of(pinned, "errors>10%", mode="pin")
    answer(watch, times=30)
    ended(watch)
    assert pinned.asked == []
    overtaken = PromotingMover(ChannelMoved("somebody was first"))
    watch, trial = canary_of(overtaken, "errors>10%")
    answer(watch, times=30)
    ended(watch)
    assert (overtaken.asked, trial.share) == ([], 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"canary": "2=5%,promote=100"}, "needs a rule of guard"),
        ({"canary": "2=5%,promote=9", "guard": "errors>1%"}, "less than the 50 requests"),
        ({"canary": "promote=100", "guard": "errors>1%"}, "beside one VERSION=SHARE%"),
        ({"canary": "2=5%,promote=0", "guard": "errors>1%"}, "beside one VERSION=SHARE%"),
        ({"canary": "2=5%,promote=1,promote=2", "guard": "errors>1%"}, "beside one VERSION=SHARE%"),
    ],
)
def test_a_canary_that_nobody_judges_is_wrong_usage(given: dict[str, str], said: str) -> None:
    with pytest.raises(WrongUsage, match=said):
        load_settings(**given)


@pytest.mark.parametrize("is_good", [True, False])
def test_a_server_promotes_a_canary_or_takes_it_back(
    store: Store, digits: Manifest, is_good: bool
) -> None:
    promote(store, store.manifest(1))
    low = -1e9 if is_good else 1e9
    rule = Unknown(score="max-logit", threshold=low, rate=0.05, images=20)
    third = publish_tiny(store, tasks=[("more", ["x"])], parent=store.manifest(1), unknown=rule)
    canary = f"{third.version}=50%,promote=50"
    with live_server(Path(store.location), canary=canary, guard="unknown>50%") as live:
        wait_for(lambda: live.http.get("/readyz").json().get("canary") == third.version)
        assert live.http.get("/live").json()["canary"]["share"] == 0.5
        for _ in range(100):
            live.predict(png())
        if is_good:
            wait_for(lambda: live.http.get("/readyz").json().get("version") == third.version)
        wait_for(lambda: live.http.get("/readyz").json().get("canary") is None)
        versions = {live.predict(png()).json()["version"] for _ in range(4)}
    assert versions == {third.version if is_good else 1}
    head = store.history("production")[-1]
    assert head.target == (third.version if is_good else 1)
    assert head.actor.startswith("canary:") is is_good
