"""Fork workers that have all their modules: a killed one is replaced within a moment.

python -m tests.faults.worker_nursery ARGUMENT…

Each line on stdin starts `dne-train worker` with the arguments; its process id is the answer. A
worker is dead after two seconds without a beat, and a job survives any number of dead workers.
"""

from __future__ import annotations

import os
import signal
import sys

import trainer.loop.learn  # noqa: F401 – loaded before the first fork, with torch
from model_store.loop import jobs
from trainer.cli import main


def nurse(arguments: list[str]) -> None:
    jobs.LEASE_S, jobs.MAX_CLAIMS = 2.0, 10_000
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
    for _ in sys.stdin:
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(main(["worker", *arguments]))
        print(process, flush=True)


if __name__ == "__main__":
    nurse(sys.argv[1:])
