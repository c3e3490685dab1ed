"""The worker's command ends when it is told to, or when its parent is gone."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.trainer.folders import Listening
from trainer.loop import worker
from trainer.loop.worker import Worker
from trainer.request import Work


def test_a_closed_standard_input_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr("trainer.loop.worker.os.kill", lambda *given: told.append(given))
    ours, theirs = os.pipe()
    with os.fdopen(ours) as standard_input, os.fdopen(theirs, "wb", 0) as parent:
        monkeypatch.setattr("sys.stdin", standard_input)
        waiting = threading.Thread(target=worker._end_with_stdin)
        waiting.start()
        parent.write(b"still here")
        assert told == []
        parent.close()
        waiting.join(20)
    assert told == [(os.getpid(), signal.SIGTERM)]


def test_a_signal_while_no_job_runs_is_a_good_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Worker, **how: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Worker, "run", interrupted)
    monkeypatch.setattr("trainer.loop.worker.show_progress", Listening)
    before = signal.getsignal(signal.SIGTERM)
    try:
        work = Work(store=str(tmp_path / "models"), device="cpu")
        assert worker.run_worker(work, checkpoint=tmp_path) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
