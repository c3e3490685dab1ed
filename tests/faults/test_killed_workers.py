"""Workers killed at random moments: every job ends, and every label is learnt once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from model_store.loop.describe import state_of
from model_store.loop.jobs import Jobs
from model_store.loop.waiting import version_path
from model_store.store.store import Store
from tests.live_server import wait_for
from tests.trained_store import TrainedStore
from tests.trainer.loop.labelled import inbox_of, label_pictures

pytestmark = [pytest.mark.faults, pytest.mark.slow]
KILLS = 25


class Nursery:
    """Starts workers on one store, one at a time, and kills them."""

    def __init__(self, store: Path, checkpoint: Path) -> None:
        options = ["--poll-seconds", "0.1", "--threads", "1", "--device", "cpu"]
        command = [sys.executable, "-m", "tests.faults.worker_nursery", *options]
        self._process = subprocess.Popen(
            [*command, "--store", str(store), "--checkpoint", str(checkpoint)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run a worker, and kill it at the end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        worker = int(self._process.stdout.readline())
        try:
            yield
        finally:
            os.kill(worker, signal.SIGKILL)
            wait_for(lambda: not _lives(worker))

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def nursery(trained_copy: TrainedStore, tmp_path: Path) -> Iterator[Nursery]:
    made = Nursery(trained_copy.pretrained, tmp_path / "checkpoint")
    yield made
    made.stop()


class Asking:
    """Asks for a job with labels of its own whenever the one before has ended."""

    def __init__(self, location: Path) -> None:
        self._location = location
        self.store = Store.open(str(location))
        self.jobs = Jobs(self.store.objects)
        self.asked: list[str] = []
        self.items: list[str] = []

    @property
    def has_ended(self) -> bool:
        return not self.asked or self.jobs.job(self.asked[-1]).end is not None

    @property
    def claims(self) -> int:
        """Count the workers that have taken the newest job."""
        return self.jobs.state(self.asked[-1]).claim

    def ask_if_ended(self) -> None:
        if self.has_ended:
            place = len(self.asked)
            counts = {f"new-{place}": 20, "a": 4}
            self.items += label_pictures(self._location, counts, seed=100 + place)
            asked = self.jobs.ask(channel="production", actor="tests", reason="")
            self.asked.append(asked.id)

    def uses(self) -> Counter[str]:
        """Count how often each label was used by the versions behind the head."""
        head = self.store.resolve(self.store.history("production")[-1])
        used = inbox_of(self._location).used()
        behind = version_path(self.store, head).numbers & used.keys()
        return Counter(item for version in behind for item in used[version].items)


def _seconds_of_a_job(asking: Asking, nursery: Nursery) -> float:
    """Let a worker do the first job in peace, so that the others are killed in the midst of one."""
    asking.ask_if_ended()
    with nursery.working():
        wait_for(lambda: asking.claims > 0, seconds=120)
        begun = time.monotonic()
        wait_for(lambda: asking.has_ended, seconds=300)
    return time.monotonic() - begun


@pytest.mark.timeout(1500)
def test_jobs_whose_workers_are_killed_use_each_label_once(
    trained_copy: TrainedStore, nursery: Nursery
) -> None:
    asking, chance = Asking(trained_copy.pretrained), random.Random(0)
    whole_s = _seconds_of_a_job(asking, nursery)
    cut_short = 0
    for _ in range(KILLS):
        asking.ask_if_ended()
        claims = asking.claims
        with nursery.working():
            wait_for(lambda: asking.claims > claims or asking.has_ended, seconds=120)  # noqa: B023
            time.sleep(chance.uniform(0.0, whole_s))
        cut_short += not asking.has_ended
    assert cut_short > KILLS // 4, "most workers were killed when they had nothing to do"
    with nursery.working():
        wait_for(lambda: asking.has_ended, seconds=300)
    states = [state_of(asking.jobs.job(job)) for job in asking.asked]
    assert set(states) <= {"promoted", "refused"}, states
    uses = asking.uses()
    assert set(uses.values()) <= {1}, "a label was learnt twice"
    if "refused" not in states:
        assert set(uses) == set(asking.items), "a label was lost"
    targets = [record.target for record in asking.store.history("production")]
    assert len(set(targets)) == len(targets), "a version was promoted twice"
    assert not asking.store.verify().problems
