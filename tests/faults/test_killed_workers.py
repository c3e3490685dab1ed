"""Workers killed at random moments: the job ends, once, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from model_store.jobs.describe import state_of
from model_store.jobs.jobs import Jobs
from model_store.store.store import Store
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


@pytest.mark.timeout(900)
def test_a_job_whose_workers_are_killed_ends_in_one_promotion(
    trained_copy: TrainedStore, tmp_path: Path
) -> None:
    location = trained_copy.pretrained
    store = Store.open(str(location))
    ids = label_pictures(location, {"zebra": 20, "yak": 20, "a": 12})
    jobs = Jobs(store.objects)
    job = jobs.ask(channel="production", actor="tests", reason="").id
    chance, before = random.Random(0), len(store.history("production"))
    for _ in range(KILLS):
        worker = start(location, tmp_path / "checkpoint")
        time.sleep(chance.uniform(3.0, 12.0))
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        if jobs.job(job).end is not None:
            break
    worker = start(location, tmp_path / "checkpoint")
    try:
        until = time.monotonic() + 300
        while jobs.job(job).end is None and time.monotonic() < until:
            time.sleep(0.2)
    finally:
        worker.kill()
        worker.wait()
    assert state_of(jobs.job(job)) in ("promoted", "refused")
    moves = store.history("production")[before:]
    assert len({record.target for record in moves}) == len(moves) <= 2, "no version moved in twice"
    classes = store.resolve(store.history("production")[-1]).classes
    assert len(set(classes)) == len(classes)
    assert not store.verify().problems
    index = {item for record in inbox_of(location).used().values() for item in record.items}
    assert index <= set(ids)
    assert len(inbox_of(location).history(ids[0])) == 1, "labels are as they were"
