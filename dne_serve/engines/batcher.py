"""Group tickets into batches for worker threads. Knows nothing of images, torch or HTTP.

A free worker takes its share of the queue at once, up to the largest batch. While all workers are
busy, the queue fills: a lone ticket pays no delay, and a crowd gets large batches.

Tickets wait in flows. Flows have turns, one ticket each, within a batch and between batches: a flow
with many tickets delays the others by one ticket a turn, which is deficit round robin where all
tickets cost the same.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from dne_serve.errors import QueueFull, Stopped

_MIXED_S = 1.0
"""Time after which a flow that is asked alone fills batches by itself."""
Key = TypeVar("Key")
Item = TypeVar("Item")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ticket(Generic[Key, Item, Answer]):
    """One item, the key it is batched under, and its answer to come."""

    key: Key
    item: Item
    flow: Flow[Key, Item, Answer] | None = None
    arrived_ns: int = field(default_factory=time.perf_counter_ns)
    answer: Future[Answer] = field(default_factory=Future)


@dataclass(slots=True, kw_only=True, eq=False)
class Flow(Generic[Key, Item, Answer]):
    """Tickets that wait behind each other: those of one model. Only the batcher changes it."""

    most: int | None = None
    """Tickets that may wait, queued or reserved; None leaves the limit of the whole queue."""
    burst: int | None = None
    """Tickets that go in one batch while other flows are in use: who comes next waits for less."""
    on_ran: Callable[[Sequence[Ticket[Key, Item, Answer]], int, int], None] | None = None
    """Called with its tickets of each batch, and with the beginning and the end of the batch."""
    tickets: deque[Ticket[Key, Item, Answer]] = field(default_factory=deque)
    reserved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """Work that must happen on the first worker thread, between two of its batches."""

    work: Callable[[], Any]
    workers: int | None = None
    """With a number: no other worker runs a batch meanwhile, and so many run batches after."""
    done: Future[Any] = field(default_factory=Future)


class QueuePlaces:
    """Places in the queue for items that are still being prepared. Thread-safe."""

    def __init__(self, count: int, *, give_back: Callable[[int], None]) -> None:
        self._left = count
        self._give_back = give_back

    def release_one(self) -> None:
        """Give one place back."""
        self._left -= 1
        self._give_back(1)

    def release(self) -> None:
        """Give all places back that are left."""
        count, self._left = self._left, 0
        self._give_back(count)


class Batcher(Generic[Key, Item, Answer]):
    """A queue of tickets, and the threads that answer them."""

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
        """Let up to `workers` threads call `run` at a time. An exception among the answers of `run`
        belongs to its own ticket. `join` gives the key under which tickets of two keys go in one
        batch, or None if they must not."""
        self._run = run
        self._join = join
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._on_batch = on_batch
        self._on_ran = on_ran
        self._own_flow: Flow[Key, Item, Answer] = Flow()
        self._turns: deque[Flow[Key, Item, Answer]] = deque()
        """The flows with tickets, in the order of their turns."""
        self._queued = 0
        self._last_flow = self._own_flow
        self._mixed_s = -math.inf
        """When another flow than the one before got tickets."""
        self._calls: deque[Call] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._held = False
        self._under_way = 0
        self._reserved = 0
        self._workers = workers
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the worker threads. The first one is always the same: torch wants one thread."""
        while len(self._threads) < self._workers:
            number = len(self._threads)
            name = f"engine-{number + 1}" if number else "engine"
            work = partial(self._loop, number)
            self._threads.append(threading.Thread(target=work, name=name, daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """Finish the batches under way, and fail all queued tickets with Stopped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for flow in self._turns:
            while flow.tickets:
                _fail(flow.tickets.popleft().answer, Stopped("the server is stopping"))
        self._turns, self._queued = deque(), 0
        while self._calls:
            _fail(self._calls.popleft().done, Stopped("the server is stopping"))

    @property
    def depth(self) -> int:
        return self._queued

    def submit(
        self,
        key: Key,
        *,
        items: Sequence[Item],
        flow: Flow[Key, Item, Answer] | None = None,
    ) -> list[Future[Answer]]:
        """Queue all of `items` or, with QueueFull, none. Answers come in the order of `items`."""
        flow = flow or self._own_flow
        tickets: list[Ticket[Key, Item, Answer]] = [
            Ticket(key=key, item=item, flow=flow) for item in items
        ]
        with self._changed:
            self._refuse_when_stopping()
            self._check_room(len(tickets), flow, with_reserved=False)
            if tickets and not flow.tickets:
                self._turns.append(flow)
            if flow is not self._last_flow:
                self._last_flow, self._mixed_s = flow, time.monotonic()
            flow.tickets.extend(tickets)
            self._queued += len(tickets)
            self._changed.notify_all()  # some workers may not take any
        return [ticket.answer for ticket in tickets]

    @property
    def reserved(self) -> int:
        """Return the number of places that are reserved."""
        return self._reserved

    def reserve(self, count: int, *, flow: Flow[Key, Item, Answer] | None = None) -> QueuePlaces:
        """Reserve places for items that are not ready yet, or raise QueueFull. Reserved places
        count against other reservations, and not against items that are ready."""
        flow = flow or self._own_flow
        with self._changed:
            self._check_room(count, flow, with_reserved=True)
            self._reserved += count
            flow.reserved += count
        return QueuePlaces(count, give_back=partial(self._unreserve, flow))

    def _unreserve(self, flow: Flow[Key, Item, Answer], count: int) -> None:
        with self._changed:
            self._reserved -= count
            flow.reserved -= count

    def _check_room(
        self, count: int, flow: Flow[Key, Item, Answer], *, with_reserved: bool
    ) -> None:
        reserved, own = (self._reserved, flow.reserved) if with_reserved else (0, 0)
        if flow.most is not None and len(flow.tickets) + own + count > flow.most:
            raise QueueFull(f"more than {flow.most} images of this model wait; try again soon")
        if self._queued + reserved + count > self._max_queue:
            raise QueueFull(f"more than {self._max_queue} images are waiting; try again soon")

    def call(self, work: Callable[[], Result], *, workers: int | None = None) -> Future[Result]:
        """Run `work` on the first worker thread before its next batch. With `workers`, wait until
        no worker runs a batch, and let so many run batches after."""
        call = Call(work=work, workers=workers)
        with self._changed:
            self._refuse_when_stopping()
            self._calls.append(call)
            self._changed.notify_all()
        return call.done

    def _refuse_when_stopping(self) -> None:
        if self._stopping:
            raise Stopped("the server is stopping")

    def _loop(self, number: int) -> None:
        while self._work_once(number):
            pass

    def _work_once(self, number: int) -> bool:
        """Do one call or one batch. False when it is time to stop."""
        # A function of its own, so that nothing of the last batch stays referenced while we wait.
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._has_work(number))
            if self._stopping:
                return False
            if self._calls and not number:
                work = partial(self._answer_call, self._calls.popleft())
            else:
                work = partial(self._answer_batch, *self._take())
        work()
        return True

    def _has_work(self, number: int) -> bool:
        if self._calls and not number:
            return True
        return bool(self._queued) and not self._held and number < self._workers

    def _answer_call(self, call: Call) -> None:
        if call.workers is None:
            _answer(call)
            return
        with self._changed:
            self._held = True
            self._changed.wait_for(lambda: not self._under_way)
        _answer(call)
        with self._changed:
            self._held, self._workers = False, call.workers
            if not self._stopping:
                self.start()
            self._changed.notify_all()

    def _take(self) -> tuple[Key, list[Ticket[Key, Item, Answer]]]:
        """Take the oldest ticket of the flow whose turn it is, then those that can join it, one of
        each flow in turn and oldest first, and the key of all. The others keep their place. No
        worker takes more than its share of all tickets, queued or under way: the other workers are
        free soon, and nobody waits long for one large batch."""
        key = self._turns[0].tickets[0].key
        most = min(math.ceil((self._queued + self._under_way) / self._workers), self._max_batch)
        batch: list[Ticket[Key, Item, Answer]] = []
        passed_over: list[deque[Ticket[Key, Item, Answer]]] = [deque() for _ in self._turns]
        looking = deque(zip(self._turns, passed_over, strict=True))
        is_mixed = time.monotonic() - self._mixed_s < _MIXED_S
        taken: Counter[Flow[Key, Item, Answer]] = Counter()
        while looking and len(batch) < most:
            flow, others = looking.popleft()
            if is_mixed and flow.burst is not None and taken[flow] >= flow.burst:
                continue
            taken[flow] += 1
            while flow.tickets:
                ticket = flow.tickets.popleft()
                joined = self._join(key, ticket.key)
                if joined is None:
                    others.append(ticket)
                elif ticket.answer.set_running_or_notify_cancel():
                    batch.append(ticket)
                    key = joined
                    looking.append((flow, others))
                    break
        for flow, others in zip(self._turns, passed_over, strict=True):
            flow.tickets.extendleft(reversed(others))
        self._turns.rotate(-1)
        self._turns = deque(flow for flow in self._turns if flow.tickets)
        self._queued = sum(len(flow.tickets) for flow in self._turns)
        self._under_way += len(batch)
        return key, batch

    def _answer_batch(self, key: Key, batch: list[Ticket[Key, Item, Answer]]) -> None:
        if not batch:  # all were cancelled
            return
        try:
            answers = self._run_batch(key, batch)
        except Exception as error:  # belongs to these tickets, not to the loop
            for ticket in batch:
                ticket.answer.set_exception(error)
        else:
            for ticket, answer in zip(batch, answers, strict=True):
                if isinstance(answer, Exception):
                    ticket.answer.set_exception(answer)
                else:
                    ticket.answer.set_result(answer)
        with self._changed:
            self._under_way -= len(batch)
            if self._held:
                self._changed.notify_all()

    def _run_batch(
        self, key: Key, batch: list[Ticket[Key, Item, Answer]]
    ) -> list[Answer | Exception]:
        self._on_batch(len(batch))
        began_ns = time.perf_counter_ns()
        answers = list(self._run(key, [ticket.item for ticket in batch]))
        if len(answers) != len(batch):
            raise RuntimeError(f"{len(batch)} items gave {len(answers)} answers")
        ended_ns = time.perf_counter_ns()
        self._on_ran(batch, began_ns, ended_ns)
        by_flow: dict[Flow[Key, Item, Answer], list[Ticket[Key, Item, Answer]]] = {}
        for ticket in batch:
            if ticket.flow is not None and ticket.flow.on_ran is not None:
                by_flow.setdefault(ticket.flow, []).append(ticket)
        for flow, tickets in by_flow.items():
            if flow.on_ran is not None:
                flow.on_ran(tickets, began_ns, ended_ns)
        return answers


def _answer(call: Call) -> None:
    if not call.done.set_running_or_notify_cancel():
        return
    try:
        result = call.work()
    except Exception as error:  # belongs to the caller that asked for the work
        call.done.set_exception(error)
    else:
        call.done.set_result(result)


def _fail(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
