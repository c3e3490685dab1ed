"""Jobs: records, claims, leases, cancelling."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model_store.backends.base import Objects
from model_store.errors import ClaimLost, JobCancelled, JobNotFound, JobUnderWay, WrongUsage
from model_store.jobs import jobs as jobs_module
from model_store.jobs.claim import Claim
from model_store.jobs.describe import state_of
from model_store.jobs.jobs import LEASE_S, MAX_CLAIMS, Jobs
from model_store.store.store import Store


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


def take(jobs: Jobs, worker: str = "one") -> Claim | None:
    return jobs.claim_next(channel="production", worker=worker)


def taken(jobs: Jobs, worker: str = "one") -> Claim:
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

    def come(number: int) -> Claim | None:
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


def test_beats_tell_how_far_the_worker_is_and_leave_no_heap(jobs: Jobs) -> None:
    job, claim = ask(jobs), taken(jobs)
    for number in range(5):
        claim.beat("learning", share=number / 5, seconds_left=3.0, log=["a line"] * 100)
    found = jobs.job(job)
    assert found.beat is not None
    assert (found.beat.number, found.beat.share, len(found.beat.log)) == (5, 0.8, 30)
    assert len(found.standing.beats) == 2
    claim.end("promoted", reason="", versions=())
    assert jobs.job(job).standing.beats == []


def test_a_dead_worker_is_taken_over_and_may_not_go_on(jobs: Jobs, clock: Clock) -> None:
    ask(jobs)
    first = taken(jobs)
    first.beat("learning")
    clock.later_s = LEASE_S - 1
    assert take(jobs, "two") is None
    clock.later_s = LEASE_S + 1
    second = taken(jobs, "two")
    assert second.number == 2
    second.check()
    with pytest.raises(ClaimLost):
        first.check()
    first.beat("learning")  # it was asleep; its beats keep nobody's claim alive
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
