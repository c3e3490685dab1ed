"""Jobs: records, claims, leases, cancelling."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model_store.backends.base import Objects
from model_store.errors import ClaimLost, JobCancelled, JobNotFound, JobUnderWay, WrongUsage
from model_store.loop import jobs as jobs_module
from model_store.loop.claim import (
    JobClaim,
    claim_name,
    end_name,
    heartbeat_name,
    job_name,
    turn_name,
)
from model_store.loop.describe import state_of
from model_store.loop.item_names import new_id
from model_store.loop.jobs import LEASE_S, MAX_CLAIMS, Jobs
from model_store.records.jobs import TurnRecord
from model_store.records.sealing import Record, read_record, seal
from model_store.store.store import Store
from tests.model_store.backends import ClockedObjects

YEAR_S = 365 * 86400.0


class Clock:
    """The clock of the store, some time after its newest object."""

    def __init__(self) -> None:
        self.later_s = 0.0

    def __call__(self, objects: Objects) -> float:
        return max(entry.modified_s for entry in objects.list("jobs")) + self.later_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def jobs(tmp_path: Path, clock: Clock) -> Jobs:
    return Jobs(Store.create(str(tmp_path / "models")).objects, store_clock=clock)


def ask(jobs: Jobs, channel: str = "production") -> str:
    return jobs.ask(channel=channel, actor="a person", reason="enough labels").id


def take(jobs: Jobs, worker: str = "one") -> JobClaim | None:
    return jobs.claim_next(channel="production", worker=worker)


def taken(jobs: Jobs, worker: str = "one") -> JobClaim:
    claim = take(jobs, worker)
    assert claim is not None
    return claim


def state(jobs: Jobs, job: str) -> str:
    return state_of(jobs.job(job))


def test_a_job_is_taken_by_one_worker(jobs: Jobs) -> None:
    job = ask(jobs)
    assert state(jobs, job) == "waiting"
    claim = taken(jobs)
    assert (claim.job, claim.number) == (job, 1)
    assert take(jobs, "two") is None
    assert state(jobs, job) == "running"
    found = jobs.job(job).claim
    assert found is not None
    assert found.worker == "one"


def test_of_workers_that_come_at_once_one_gets_the_job(jobs: Jobs, clock: Clock) -> None:
    job, at_once = ask(jobs), threading.Barrier(8)

    def come(number: int) -> JobClaim | None:
        at_once.wait()
        return take(jobs, f"worker {number}")

    with ThreadPoolExecutor(8) as workers:
        found = [one for one in workers.map(come, range(8)) if one is not None]
        assert [(one.job, one.number) for one in found] == [(job, 1)]
        clock.later_s = LEASE_S + 1  # from now on every worker seems dead at once
        numbers = [one.number for one in workers.map(come, range(8)) if one is not None]
    assert sorted(numbers) == list(range(2, 2 + len(numbers))), "two workers have one claim"
    assert numbers


def test_the_job_of_a_dead_worker_of_other_software_is_taken_over(
    jobs: Jobs, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ask(jobs)
    with monkeypatch.context() as other:
        other.setattr(jobs_module, "__version__", "99.0.0")
        taken(jobs, "of tomorrow")
    found = jobs.job(job).claim
    assert found is not None
    assert found.software == "dne-serve 99.0.0"
    assert take(jobs) is None
    clock.later_s = LEASE_S + 1
    assert taken(jobs).number == 2
    again = jobs.job(job).claim
    assert again is not None
    assert again.software != found.software


def test_one_job_a_channel_is_open_at_a_time(jobs: Jobs) -> None:
    job = ask(jobs)
    with pytest.raises(JobUnderWay, match=job):
        ask(jobs)
    ask(jobs, channel="staging")
    assert taken(jobs).job == job
    assert take(jobs) is None, "a worker takes jobs of its own channel only"


def test_heartbeats_report_progress_and_do_not_pile_up(jobs: Jobs) -> None:
    job, claim = ask(jobs), taken(jobs)
    for number in range(5):
        claim.heartbeat("learning", share=number / 5, seconds_left=3.0, log=["a line"] * 100)
    found = jobs.job(job)
    assert found.heartbeat is not None
    assert (found.heartbeat.number, found.heartbeat.share, len(found.heartbeat.log)) == (5, 0.8, 30)
    assert len(found.state.heartbeats) == 2
    claim.end("promoted", reason="", versions=())
    assert jobs.job(job).state.heartbeats == []


def test_a_dead_worker_is_taken_over_and_may_not_go_on(jobs: Jobs, clock: Clock) -> None:
    ask(jobs)
    first = taken(jobs)
    first.heartbeat("learning")
    clock.later_s = LEASE_S - 1
    assert take(jobs, "two") is None
    clock.later_s = LEASE_S + 1
    second = taken(jobs, "two")
    assert second.number == 2
    second.check()
    with pytest.raises(ClaimLost):
        first.check()
    first.heartbeat("learning")  # it was asleep; its beats keep nobody's claim alive
    clock.later_s = 2 * LEASE_S
    assert taken(jobs, "three").number == 3


def test_a_job_that_workers_die_of_is_given_up(jobs: Jobs, clock: Clock) -> None:
    job = ask(jobs)
    clock.later_s = LEASE_S + 1
    for number in range(MAX_CLAIMS):
        assert taken(jobs).number == number + 1
    assert take(jobs) is None
    assert state(jobs, job) == "failed"
    ask(jobs)


def test_a_job_ends_once(jobs: Jobs) -> None:
    job, claim = ask(jobs), taken(jobs)
    assert claim.end("promoted", reason="", versions=())
    assert not claim.end("failed", reason="too late", versions=())
    assert state(jobs, job) == "promoted"
    with pytest.raises(ClaimLost):
        claim.check()


def test_a_job_that_nobody_has_is_cancelled_at_once(jobs: Jobs) -> None:
    job = ask(jobs)
    jobs.cancel(job, actor="a person")
    assert state(jobs, job) == "cancelled"
    assert take(jobs) is None


def test_a_worker_hears_that_its_job_is_cancelled(jobs: Jobs, clock: Clock) -> None:
    job, claim = ask(jobs), taken(jobs)
    jobs.cancel(job, actor="a person")
    assert state(jobs, job) == "cancelling"
    with pytest.raises(JobCancelled):
        claim.check()
    clock.later_s = LEASE_S + 1
    jobs.cancel(job, actor="a person")  # its worker died before it could end it
    assert state(jobs, job) == "cancelled"


def test_names_that_are_no_jobs_are_not_found(jobs: Jobs) -> None:
    for name in ("../../etc", "20261117t120000000-0123456789ab", ""):
        with pytest.raises(JobNotFound):
            jobs.job(name)
    with pytest.raises(WrongUsage, match="reason"):
        jobs.ask(channel="production", actor="a", reason="x" * 2001)


def test_a_claim_that_is_dated_in_the_future_dies_one_lease_after_it_was_seen() -> None:
    objects = ClockedObjects()
    jobs = Jobs(objects)
    job = ask(jobs)
    objects.now_s += YEAR_S
    taken(jobs, "of next year").heartbeat("learning")
    objects.now_s -= YEAR_S  # the clock was set right, and the worker is dead
    assert take(jobs) is None, "nobody knows yet how long it is dead"
    objects.now_s += LEASE_S / 2
    assert take(jobs) is None
    objects.now_s -= 2 * LEASE_S  # the first doubt is in the future now, too
    assert take(jobs) is None
    objects.now_s += LEASE_S + 1
    claim = taken(jobs)
    assert claim.number == 2
    claim.end("promoted", reason="", versions=())
    assert jobs.job(job).state.doubts == []


def test_a_living_worker_goes_on_after_the_clock_was_set_back() -> None:
    objects = ClockedObjects()
    jobs = Jobs(objects)
    ask(jobs)
    objects.now_s += YEAR_S
    claim = taken(jobs)
    objects.now_s -= YEAR_S
    for _ in range(8):
        claim.heartbeat("learning")
        objects.now_s += LEASE_S / 2
        assert take(jobs, "two") is None
    claim.check()
    objects.now_s += LEASE_S
    assert taken(jobs, "two").number == 2, "its old claim is dated in the future still"


def test_of_twelve_that_ask_at_once_one_gets_a_job(jobs: Jobs) -> None:
    at_once = threading.Barrier(12)

    def come(_: int) -> str:
        at_once.wait()
        try:
            return ask(jobs)
        except JobUnderWay as error:
            return f"not {error.job}"

    with ThreadPoolExecutor(12) as people:
        for _ in range(10):
            answers = list(people.map(come, range(12)))
            job = next(iter(jobs.states()))
            assert sorted(answers) == [job, *[f"not {job}"] * 11]
            jobs.cancel(job, actor="a person")


def test_a_turn_whose_owner_died_is_passed_over() -> None:
    objects = ClockedObjects()
    jobs = Jobs(objects)
    job = ask(jobs)
    objects.delete(job_name(job))  # as if it had died before it could write that
    with pytest.raises(JobUnderWay, match=job):
        ask(jobs)
    for away_s in (-LEASE_S - 1, LEASE_S + 1):
        objects.now_s += away_s
        job = ask(jobs)
        objects.delete(job_name(job))


def test_a_forged_turn_with_the_last_number_stops_no_job(jobs: Jobs) -> None:
    objects, last = jobs.objects, 99_999_999
    job = ask(jobs)
    jobs.cancel(job, actor="a person")
    turn = read_record(objects, turn_name("production", 1), TurnRecord)
    body = {**turn.model_dump(mode="json"), "number": last, "job": new_id()}
    objects.create(turn_name("production", last), seal(body))
    ask(jobs)
    assert read_record(objects, turn_name("production", 2), TurnRecord).number == 2


@pytest.mark.parametrize("time", ["9999-99-99T00:00:00Z", "2026-02-30T00:00:00Z"])
def test_a_record_with_an_impossible_time_is_passed_over_and_reported(
    jobs: Jobs, caplog: pytest.LogCaptureFixture, time: str
) -> None:
    def forge(name: str, record: Record) -> None:
        body = record.model_dump(mode="json")
        jobs.objects.delete(name)
        jobs.objects.create(name, seal({**body, "time": time}))

    job = ask(jobs)
    taken(jobs).heartbeat("learning")
    held = jobs.job(job)
    assert held.claim is not None
    assert held.heartbeat is not None
    forge(claim_name(job, 1), held.claim)
    forge(heartbeat_name(job, 1, 1), held.heartbeat)
    (found,) = jobs.of_channel("production", limit=10)
    assert (found.record.id, found.claim, found.heartbeat) == (job, None, None)
    jobs.cancel(job, actor="a person")
    JobClaim(jobs.objects, job=job, number=1).end("cancelled", reason="", versions=())
    ended = jobs.job(job).end
    assert ended is not None
    forge(end_name(job), ended)
    other = ask(jobs)
    assert [one.record.id for one in jobs.of_channel("production", limit=10)] == [other]
    forge(job_name(other), jobs.job(other).record)
    assert list(jobs.of_channel("production", limit=10)) == []
    for name in (claim_name(job, 1), heartbeat_name(job, 1, 1), end_name(job), job_name(other)):
        assert f"{name} cannot be trusted: time" in caplog.text
