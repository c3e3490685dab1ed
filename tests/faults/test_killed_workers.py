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

from model_store.jobs.describe import state_of
from model_store.jobs.jobs import Jobs
from model_store.jobs.waiting import lineage_of
from model_store.store.store import Store
from tests.live_server import wait_for
from tests.trained_store import TrainedStore
from tests.trainer.inbox.labelled import inbox_of, label_pictures

pytestmark = [pytest.mark.faults, pytest.mark.slow]
KILLS = 10
WORKER = """
import sys
import model_store.jobs.jobs as jobs
jobs.LEASE_S, jobs.MAX_CLAIMS = 2.0, 10_000
from trainer.cli import main
sys.exit(main())
"""


def start(store: Path, checkpoint: Path) -> subprocess.Popen[bytes]:
    options = ["--poll-seconds", "0.1", "--threads", "1", "--device", "cpu"]
    command = [sys.executable, "-c", WORKER, "worker", *options]
    command += ["--store", str(store), "--checkpoint", str(checkpoint)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


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
        behind = lineage_of(self.store, head).numbers & used.keys()
        return Counter(item for version in behind for item in used[version].items)


@pytest.mark.timeout(1500)
def test_jobs_whose_workers_are_killed_use_each_label_once(
    trained_copy: TrainedStore, tmp_path: Path
) -> None:
    asking, chance = Asking(trained_copy.pretrained), random.Random(0)
    for _ in range(KILLS):
        asking.ask_if_ended()
        with working(trained_copy.pretrained, tmp_path / "checkpoint"):
            time.sleep(chance.uniform(1.0, 10.0))
    with working(trained_copy.pretrained, tmp_path / "checkpoint"):
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


@contextmanager
def working(store: Path, checkpoint: Path) -> Iterator[None]:
    """Run a worker, and kill it at the end."""
    worker = start(store, checkpoint)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
