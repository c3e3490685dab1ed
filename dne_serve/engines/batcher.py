"""Groups tickets into batches for worker threads, usually one. Knows nothing of images, torch or
HTTP.

When a worker is free it takes what is queued, up to the maximum; while all are busy, the queue
fills. A lone ticket pays no delay and a crowd gets large batches. One thing is waited for: clients
that have just got their answers and are sending the next ticket, for a moment that is short beside
the batch they were in. Else they would be split, some of them and then the others, for ever.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from dne_serve.errors import QueueFull, Stopped

Key = TypeVar("Key")
Item = TypeVar("Item")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ticket(Generic[Key, Item, Answer]):
    """One item, the key it is batched under, and its answer to come."""

    key: Key
    item: Item
    arrived_ns: int = field(default_factory=time.perf_counter_ns)
    answer: Future[Answer] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """Work that must happen on a worker thread, between two of its batches."""

    work: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expecting:
    """What a worker may wait for: as many tickets as it has just answered and seen waiting."""

    tickets: int
    until_s: float


NOBODY = Expecting(tickets=0, until_s=0.0)
PATIENCE = 0.1
"""How long to wait for them, in times of the batch that they were in."""
MOST_PATIENCE_S = 0.02


class Batcher(Generic[Key, Item, Answer]):
    def __init__(
        self,
        run: Callable[[Key, Sequence[Item]], Sequence[Answer | Exception]],
        *,
        max_batch: int,
        max_queue: int,
        workers: int = 1,
        on_batch: Callable[[int], None] = lambda size: None,
        on_ran: Callable[
            [Sequence[Ticket[Key, Item, Answer]], int, int], None
        ] = lambda tickets, began_ns, ended_ns: None,
        join: Callable[[Key, Key], Key | None] = lambda one, other: one if one == other else None,
    ) -> None:
        """`run` is called by as many threads at a time as there are `workers`. An exception among
        its answers belongs to its own ticket. `join` gives the key under which tickets of two keys
        go in one batch; None: they do not."""
        self._run = run
        self._join = join
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._on_batch = on_batch
        self._on_ran = on_ran
        self._tickets: deque[Ticket[Key, Item, Answer]] = deque()
        self._calls: deque[Call] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._under_way = 0
        names = ["engine", *(f"engine-{number}" for number in range(2, workers + 1))]
        self._threads = [
            threading.Thread(target=self._loop, name=name, daemon=True) for name in names
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Batches under way are finished; what is still queued fails with Stopped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        while self._tickets:
            _fail(self._tickets.popleft().answer, Stopped("the server is stopping"))
        while self._calls:
            _fail(self._calls.popleft().done, Stopped("the server is stopping"))

    @property
    def depth(self) -> int:
        return len(self._tickets)

    def submit(self, key: Key, *, items: Sequence[Item]) -> list[Future[Answer]]:
        """Queues all of `items` or, with QueueFull, none. Answers come in the order of `items`."""
        tickets: list[Ticket[Key, Item, Answer]] = [Ticket(key=key, item=item) for item in items]
        with self._changed:
            self._refuse_when_stopping()
            if len(self._tickets) + len(tickets) > self._max_queue:
                raise QueueFull(f"{len(self._tickets)} images are waiting already; try again soon")
            self._tickets.extend(tickets)
            self._changed.notify()
        return [ticket.answer for ticket in tickets]

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Runs `work` on a worker thread before its next batch."""
        call = Call(work=work)
        with self._changed:
            self._refuse_when_stopping()
            self._calls.append(call)
            self._changed.notify()
        return call.done

    def _refuse_when_stopping(self) -> None:
        if self._stopping:
            raise Stopped("the server is stopping")

    def _loop(self) -> None:
        expecting: Expecting | None = NOBODY
        while expecting is not None:
            expecting = self._work_once(expecting)

    def _work_once(self, expecting: Expecting) -> Expecting | None:
        """None when it is time to stop."""
        # A function of its own, so that nothing of the last batch stays referenced while we wait.
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._calls or self._tickets)
            self._wait_for_company(expecting)
            if self._stopping:
                return None
            if self._calls:
                work: Callable[[], int] = partial(_answer, self._calls.popleft())
            elif self._tickets:
                work = partial(self._answer_batch, *self._take())
            else:  # another worker was faster
                return NOBODY
            if self._calls or self._tickets:
                self._changed.notify()  # there is something left for another worker
        began_s = time.perf_counter()
        answered = work()
        ended_s = time.perf_counter()
        if not answered:
            return expecting
        with self._changed:
            self._under_way -= answered
            waiting = len(self._tickets)
        return Expecting(
            tickets=min(answered + waiting, self._max_batch),
            until_s=ended_s + min(PATIENCE * (ended_s - began_s), MOST_PATIENCE_S),
        )

    def _wait_for_company(self, expecting: Expecting) -> None:
        self._changed.wait_for(
            lambda: self._stopping or self._calls or len(self._tickets) >= expecting.tickets,
            timeout=max(0.0, expecting.until_s - time.perf_counter()),
        )

    def _take(self) -> tuple[Key, list[Ticket[Key, Item, Answer]]]:
        """The oldest ticket and those that can join it, oldest first, and the key of all. The
        others keep their place. No worker takes more than its share of what there is to do: the
        others are free soon, and nobody waits long for a large batch beside small ones."""
        key = self._tickets[0].key
        all_of_it = len(self._tickets) + self._under_way
        most = min(math.ceil(all_of_it / len(self._threads)), self._max_batch)
        batch: list[Ticket[Key, Item, Answer]] = []
        others: deque[Ticket[Key, Item, Answer]] = deque()
        for ticket in self._tickets:
            joined = None if len(batch) == most else self._join(key, ticket.key)
            if joined is None:
                others.append(ticket)
            elif ticket.answer.set_running_or_notify_cancel():
                batch.append(ticket)
                key = joined
        self._tickets = others
        self._under_way += len(batch)
        return key, batch

    def _answer_batch(self, key: Key, batch: list[Ticket[Key, Item, Answer]]) -> int:
        """How many tickets were answered."""
        if not batch:  # all were cancelled
            return 0
        try:
            self._on_batch(len(batch))
            began_ns = time.perf_counter_ns()
            answers = list(self._run(key, [ticket.item for ticket in batch]))
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(batch)} items gave {len(answers)} answers")
            self._on_ran(batch, began_ns, time.perf_counter_ns())
        except Exception as error:  # belongs to these tickets, not to the loop
            for ticket in batch:
                ticket.answer.set_exception(error)
            return len(batch)
        for ticket, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                ticket.answer.set_exception(answer)
            else:
                ticket.answer.set_result(answer)
        return len(batch)


def _answer(call: Call) -> int:
    """No ticket was answered by it."""
    if not call.done.set_running_or_notify_cancel():
        return 0
    try:
        result = call.work()
    except Exception as error:  # belongs to whoever asked for the work
        call.done.set_exception(error)
    else:
        call.done.set_result(result)
    return 0


def _fail(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
