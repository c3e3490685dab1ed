"""Run `dne-train worker` beside the server, as a command: this package does not know the trainer.

The worker gives way to the server: it is niced, and leaves a core to the engine. It ends with the
server, also if the server is killed: then its standard input closes.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from model_store.errors import WrongUsage
from model_store.machine import usable_cores

NICENESS = 15
LONGEST_PAUSE_S = 60.0
LONG_LIFE_S = 300.0
"""A worker that lived so long did not die of its start."""
MAX_SHORT_LIVES = 8
STOP_S = 10.0
SECRETS = frozenset({"DNE_ADMIN_TOKEN"})
"""Variables that the worker has no use for."""

log = logging.getLogger("dne_serve")


def worker_command(*, store: str, channel: str) -> list[str]:
    """Make the command of the worker. Raise WrongUsage where `dne-train` is not installed."""
    beside = Path(sys.executable).with_name("dne-train")
    found = str(beside) if beside.exists() else shutil.which("dne-train")
    if found is None:
        raise WrongUsage(
            "--with-trainer needs the command dne-train, which is not installed here; run "
            "`dne-train worker` on a machine that has it"
        )
    options = ["--store", store, "--channel", channel, "--threads", str(_threads())]
    return [found, "worker", "--until-stdin-closes", *options]


def worker_environment(given: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in given.items() if name not in SECRETS}
    threads = str(_threads())
    return {**kept, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}


def _threads() -> int:
    return max(1, usable_cores() - 1)


class TrainerChild:
    """Keeps one worker running, and starts it anew when it dies, at most a few times in a row."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        first_pause_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command, self._environment = list(command), dict(environment)
        self._first_pause_s, self._clock = first_pause_s, clock
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_running, name="trainer", daemon=True)

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process and process.poll() is None else None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the worker: ask, and kill it if it does not listen. Its job goes to the next one."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None:
            _end(process)
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def _keep_running(self) -> None:
        short_lives = 0
        while not self._stopping.is_set():
            started = self._clock()
            code = self._run_once()
            if self._stopping.is_set():
                return
            short_lives = 0 if self._clock() - started > LONG_LIFE_S else short_lives + 1
            if short_lives >= MAX_SHORT_LIVES:
                log.error(
                    "the trainer ended %s times in a row; it is not started again", short_lives
                )
                return
            pause_s = min(LONGEST_PAUSE_S, self._first_pause_s * 2 ** (short_lives - 1))
            log.warning("the trainer ended with code %s; it starts again in %.0f s", code, pause_s)
            self._stopping.wait(pause_s)

    def _run_once(self) -> int | None:
        with self._lock:
            if self._stopping.is_set():
                return None
            try:
                self._process = subprocess.Popen(
                    self._command, env=self._environment, stdin=subprocess.PIPE
                )
            except OSError as error:
                log.error("the trainer cannot be started: %s", error.strerror)
                return None
        with suppress(OSError):  # it may be gone already
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
        log.info("the trainer runs as process %s", self._process.pid)
        with self._process:  # which closes its pipe at the end
            return self._process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
