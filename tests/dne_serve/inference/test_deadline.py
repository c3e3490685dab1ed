from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from dne_serve.errors import WaitedTooLong
from dne_serve.inference.store_threads import Deadline


def tickets(count: int) -> list[Future[int]]:
    return [Future() for _ in range(count)]


def test_answers_come_in_the_order_of_the_tickets() -> None:
    async def run() -> list[int]:
        queued = tickets(3)
        loop = asyncio.get_running_loop()
        for place, delay in ((2, 0.01), (0, 0.02), (1, 0.03)):
            loop.call_later(delay, queued[place].set_result, place)
        return await Deadline(5).answers(queued)

    assert asyncio.run(run()) == [0, 1, 2]


def test_tickets_that_did_not_begin_in_time_never_will() -> None:
    async def run() -> list[Future[int]]:
        queued = tickets(2)
        queued[0].set_running_or_notify_cancel()
        with pytest.raises(WaitedTooLong, match=r"0\.01 s"):
            await Deadline(0.01).answers(queued)
        return queued

    running, waiting = asyncio.run(run())
    assert waiting.cancelled()
    assert not running.cancelled()


def test_work_that_has_begun_is_waited_for() -> None:
    async def run() -> list[int]:
        [ticket] = queued = tickets(1)
        ticket.set_running_or_notify_cancel()
        asyncio.get_running_loop().call_later(0.05, ticket.set_result, 7)
        return await Deadline(0.01).answers(queued)

    assert asyncio.run(run()) == [7]


def test_a_request_that_is_cancelled_withdraws_its_tickets() -> None:
    async def run() -> list[Future[int]]:
        queued = tickets(2)
        task = asyncio.create_task(Deadline(5).answers(queued))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        return queued

    assert [ticket.cancelled() for ticket in asyncio.run(run())] == [True, True]


def test_a_failure_is_raised_and_all_of_them_are_looked_at(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        queued = tickets(2)
        for ticket in queued:
            ticket.set_exception(RuntimeError("the batch failed"))
        with pytest.raises(RuntimeError, match="the batch failed"):
            await Deadline(5).answers(queued)

    asyncio.run(run())
    assert "never retrieved" not in caplog.text


def test_time_spent_before_the_queue_counts() -> None:
    async def run() -> None:
        deadline = Deadline(0.05)
        with pytest.raises(WaitedTooLong):
            await deadline.result(asyncio.sleep(5))
        with pytest.raises(WaitedTooLong):
            await deadline.answers(tickets(1))

    asyncio.run(run())
