from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from dne_serve.engines.batcher import Batcher, Ticket
from dne_serve.errors import QueueFull, Stopped

LONG_S = 10.0


class Doubler:
    """Doubles numbers, as soon as its gate is open, and remembers its batches."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.busy = threading.Event()
        self.batches: list[tuple[str, list[int]]] = []

    def __call__(self, key: str, items: Sequence[int]) -> list[int]:
        self.busy.set()
        if not self.gate.wait(LONG_S):
            raise TimeoutError("the gate stayed closed")
        self.batches.append((key, list(items)))
        if key == "bad":
            raise ValueError("a bad batch")
        if key == "short":
            return [0]
        return [2 * item for item in items]


@pytest.fixture
def doubler() -> Doubler:
    return Doubler()


@pytest.fixture
def batcher(doubler: Doubler) -> Iterator[Batcher[str, int, int]]:
    batcher = Batcher[str, int, int](doubler, max_batch=4, max_queue=8)
    batcher.start()
    yield batcher
    doubler.gate.set()
    batcher.stop()


def keep_busy(batcher: Batcher[str, int, int], doubler: Doubler) -> None:
    """One ticket is under way, and holds the worker until the gate opens."""
    doubler.gate.clear()
    doubler.busy.clear()
    batcher.submit("warm", items=[0])
    assert doubler.busy.wait(LONG_S)


def test_a_batch_tells_how_long_its_tickets_waited_and_it_ran(doubler: Doubler) -> None:
    told: list[tuple[list[str], list[int], int]] = []

    def on_ran(tickets: Sequence[Ticket[str, int, int]], began_ns: int, ended_ns: int) -> None:
        waits = [began_ns - ticket.arrived_ns for ticket in tickets]
        told.append(([ticket.key for ticket in tickets], waits, ended_ns - began_ns))

    batcher = Batcher[str, int, int](doubler, max_batch=4, max_queue=8, on_ran=on_ran)
    batcher.start()
    keep_busy(batcher, doubler)
    answers = batcher.submit("v1", items=[1, 2])
    [bad] = batcher.submit("bad", items=[3])
    time.sleep(0.02)
    doubler.gate.set()
    assert [answer.result(LONG_S) for answer in answers] == [2, 4]
    with pytest.raises(ValueError, match="a bad batch"):
        bad.result(LONG_S)
    batcher.stop()
    (warm, _, held_ns), (keys, waits, ran_ns) = told
    assert (warm, keys) == (["warm"], ["v1", "v1"])
    assert held_ns >= 20_000_000
    assert all(wait >= 20_000_000 for wait in waits)
    assert 0 < ran_ns < held_ns


def test_a_lone_ticket_is_taken_at_once(batcher: Batcher[str, int, int], doubler: Doubler) -> None:
    [answer] = batcher.submit("v1", items=[21])
    assert answer.result(LONG_S) == 42
    assert doubler.batches == [("v1", [21])]


def test_what_queues_while_the_worker_is_busy_becomes_one_batch(
    batcher: Batcher[str, int, int], doubler: Doubler
) -> None:
    keep_busy(batcher, doubler)
    answers = [batcher.submit("v1", items=[item])[0] for item in (1, 2, 3)]
    doubler.gate.set()
    assert [answer.result(LONG_S) for answer in answers] == [2, 4, 6]
    assert doubler.batches[1:] == [("v1", [1, 2, 3])]


def test_a_batch_has_at_most_max_batch_items_in_the_order_they_came(
    batcher: Batcher[str, int, int], doubler: Doubler
) -> None:
    keep_busy(batcher, doubler)
    answers = batcher.submit("v1", items=[1, 2, 3, 4, 5, 6])
    doubler.gate.set()
    assert [answer.result(LONG_S) for answer in answers] == [2, 4, 6, 8, 10, 12]
    assert doubler.batches[1:] == [("v1", [1, 2, 3, 4]), ("v1", [5, 6])]


def test_a_batch_has_one_key_and_the_oldest_ticket_goes_first(
    batcher: Batcher[str, int, int], doubler: Doubler
) -> None:
    keep_busy(batcher, doubler)
    answers = [
        batcher.submit(key, items=[item])[0]
        for key, item in (("v1", 1), ("v2", 2), ("v1", 3), ("v2", 4))
    ]
    doubler.gate.set()
    assert [answer.result(LONG_S) for answer in answers] == [2, 4, 6, 8]
    assert doubler.batches[1:] == [("v1", [1, 3]), ("v2", [2, 4])]


@pytest.mark.parametrize("bad", ["bad", "short"])
def test_a_bad_batch_fails_its_own_tickets_and_the_loop_lives_on(
    batcher: Batcher[str, int, int], doubler: Doubler, bad: str
) -> None:
    keep_busy(batcher, doubler)
    good = batcher.submit("v1", items=[1])
    failing = batcher.submit(bad, items=[2, 3])
    later = batcher.submit("v2", items=[4])
    doubler.gate.set()
    assert [answer.result(LONG_S) for answer in (*good, *later)] == [2, 8]
    for answer in failing:
        with pytest.raises((ValueError, RuntimeError)):
            answer.result(LONG_S)


def test_a_full_queue_takes_none_of_the_tickets(
    batcher: Batcher[str, int, int], doubler: Doubler
) -> None:
    keep_busy(batcher, doubler)
    batcher.submit("v1", items=range(6))
    with pytest.raises(QueueFull):
        batcher.submit("v1", items=range(3))
    assert batcher.depth == 6
    batcher.submit("v1", items=range(2))


def test_a_cancelled_ticket_is_not_run(batcher: Batcher[str, int, int], doubler: Doubler) -> None:
    keep_busy(batcher, doubler)
    answers = batcher.submit("v1", items=[1, 2, 3])
    alone = batcher.submit("v2", items=[4])
    assert answers[1].cancel()
    assert alone[0].cancel()
    doubler.gate.set()
    assert [answers[0].result(LONG_S), answers[2].result(LONG_S)] == [2, 6]
    assert batcher.submit("v3", items=[5])[0].result(LONG_S) == 10
    assert doubler.batches[1:] == [("v1", [1, 3]), ("v3", [5])]


def test_a_call_runs_on_the_worker_before_the_next_batch(
    batcher: Batcher[str, int, int], doubler: Doubler
) -> None:
    keep_busy(batcher, doubler)
    [answer] = batcher.submit("v1", items=[1])
    call = batcher.call(lambda: (threading.current_thread().name, len(doubler.batches)))
    doubler.gate.set()
    assert call.result(LONG_S) == ("engine", 1)
    assert answer.result(LONG_S) == 2


def test_a_failing_call_fails_alone(batcher: Batcher[str, int, int]) -> None:
    call = batcher.call(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call.result(LONG_S)
    assert batcher.submit("v1", items=[1])[0].result(LONG_S) == 2


def test_stopping_finishes_the_batch_under_way_and_fails_what_is_queued(
    doubler: Doubler,
) -> None:
    batcher = Batcher[str, int, int](doubler, max_batch=1, max_queue=8)
    batcher.start()
    doubler.gate.clear()
    doubler.busy.clear()
    [running] = batcher.submit("v1", items=[1])
    assert doubler.busy.wait(LONG_S)
    [queued] = batcher.submit("v1", items=[2])
    stopping = threading.Thread(target=batcher.stop)
    stopping.start()
    while not batcher._stopping:
        pass
    doubler.gate.set()
    stopping.join(LONG_S)
    assert running.result(LONG_S) == 2
    with pytest.raises(Stopped):
        queued.result(LONG_S)
    with pytest.raises(Stopped):
        batcher.submit("v1", items=[3])


def test_tickets_whose_keys_join_go_in_one_batch_under_the_key_of_all(doubler: Doubler) -> None:
    """Keys that begin alike join, and the longest is the key of all."""

    def join(one: str, other: str) -> str | None:
        longer, shorter = sorted((one, other), key=len, reverse=True)
        return longer if longer.startswith(shorter) else None

    batcher = Batcher[str, int, int](doubler, max_batch=4, max_queue=8, join=join)
    batcher.start()
    try:
        keep_busy(batcher, doubler)
        tickets = [
            *batcher.submit("v1", items=[1]),
            *batcher.submit("v1.2", items=[2]),
            *batcher.submit("v1.3", items=[3]),
            *batcher.submit("v1.2.5", items=[4, 5]),
            *batcher.submit("v1", items=[6]),
        ]
        doubler.gate.set()
        assert [ticket.result(LONG_S) for ticket in tickets] == [2, 4, 6, 8, 10, 12]
        assert doubler.batches[1:] == [("v1.2.5", [1, 2, 4, 5]), ("v1.3", [3, 6])]
    finally:
        batcher.stop()


def test_an_exception_among_the_answers_belongs_to_its_own_ticket() -> None:
    def run(key: str, items: Sequence[int]) -> list[int | Exception]:
        return [ValueError("odd") if item % 2 else item for item in items]

    batcher = Batcher[str, int, int](run, max_batch=4, max_queue=8)
    batcher.start()
    try:
        tickets = batcher.submit("v1", items=[2, 3, 4])
        assert tickets[0].result(LONG_S) == 2
        with pytest.raises(ValueError, match="odd"):
            tickets[1].result(LONG_S)
        assert tickets[2].result(LONG_S) == 4
    finally:
        batcher.stop()


def test_several_workers_run_batches_at_the_same_time_and_leave_nothing_behind() -> None:
    both = threading.Barrier(2, timeout=LONG_S)

    def run(key: str, items: Sequence[int]) -> list[int]:
        both.wait()
        return [2 * item for item in items]

    batcher = Batcher[str, int, int](run, max_batch=2, max_queue=8, workers=2)
    batcher.start()
    try:
        # One submission wakes one worker, which has to wake the other for the rest of it.
        tickets = batcher.submit("v1", items=[1, 2, 3, 4])
        assert [ticket.result(LONG_S) for ticket in tickets] == [2, 4, 6, 8]
    finally:
        batcher.stop()


def test_work_with_a_number_of_workers_waits_for_every_batch_and_sets_the_number() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def run(key: str, items: Sequence[int]) -> list[int]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return list(items)

    batcher = Batcher[str, int, int](run, max_batch=1, max_queue=64)

    def most_at_a_time() -> int:
        nonlocal most
        most = 0
        answers = batcher.submit("v1", items=list(range(16)))
        assert [one.result(LONG_S) for one in answers] == list(range(16))
        return most

    batcher.start()
    assert most_at_a_time() == 1
    for workers in (2, 1, 3):
        answers = batcher.submit("v1", items=list(range(16)))
        done = batcher.call(lambda: (threading.current_thread().name, running), workers=workers)
        assert done.result(LONG_S) == ("engine", 0)
        assert [one.result(LONG_S) for one in answers] == list(range(16))
        assert most_at_a_time() == workers
    batcher.stop()
