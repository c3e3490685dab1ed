"""Run `dne-train worker` beside the server as a command: this package does not know the trainer.

The worker has a lower priority than the server, and leaves a core to the engine. It ends with the
server. Even if the server is killed, the worker's standard input closes, which ends the worker.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from model_store.errors import WrongUsage
from model_store.host.children import StderrTail, ending
from model_store.host.machine import usable_cores

NICENESS = 15
_LONGEST_PAUSE_S = 60.0
_LONG_LIFE_S = 300.0
"""A longer uptime is not a start-up failure."""
MAX_SHORT_LIVES = 8
STOP_S = 10.0
_STDERR = 2
FOREIGN = re.compile(r"DNE_.*(TOKEN|SECRET)")

log = logging.getLogger("dne_serve")


def worker_command(*, store: str, channel: str) -> list[str]:
    """Build the command of the worker. Raise WrongUsage if `dne-train` is not installed."""
    beside = Path(sys.executable).with_name("dne-train")
    dne_train = str(beside) if beside.exists() else shutil.which("dne-train")
    if dne_train is None:
        raise WrongUsage(
            "--with-trainer needs the command dne-train, which is not installed here; run "
            "`dne-train worker` on a machine that has it"
        )
    options = ["--store", store, "--channel", channel, "--threads", str(_threads())]
    return [dne_train, "worker", "--until-stdin-closes", *options]


def worker_environment(given: Mapping[str, str], *, secrets: Iterable[str]) -> dict[str, str]:
    """Leave out tokens, secrets and the names of files with them: the worker does not need them."""
    foreign = {f"DNE_{name.upper()}" for name in secrets}
    kept = {
        name: value
        for name, value in given.items()
        if name not in foreign and not FOREIGN.match(name)
    }
    threads = str(_threads())
    return {**kept, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}


def _threads() -> int:
    return max(1, usable_cores() - 1)


class BackboneAnswer(BaseModel):
    """Weights that a first task can begin with. `cached`: they are on this machine already."""

    name: str
    megabytes: int | None
    licence: str | None
    good_for: str
    cached: bool


class TrainerChild:
    """Keeps a worker running. Restarts it when it dies, at most a few times in a row."""

    _LIST_S = 60.0
    """Time for which a list of backbones counts."""

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
        self._listed: tuple[float, list[BackboneAnswer]] = (-math.inf, [])
        self._listing = threading.Lock()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_running, name="trainer", daemon=True)

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process and process.poll() is None else None

    def backbones(self) -> list[BackboneAnswer]:
        """List the backbones that the trainer knows, those on this machine first. Return none, and
        log a warning, where it cannot say."""
        with self._listing:
            until, listed = self._listed
            if self._clock() >= until:
                listed = self._ask_backbones()
                self._listed = self._clock() + self._LIST_S, listed
            return listed

    def _ask_backbones(self) -> list[BackboneAnswer]:
        command = [self._command[0], "backbones", "--json"]
        try:
            said = subprocess.run(
                command, env=self._environment, capture_output=True, timeout=STOP_S, check=True
            )
            known = [
                BackboneAnswer.model_validate(one) for one in json.loads(said.stdout)["backbones"]
            ]
        except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
            log.warning("the trainer does not say which backbones it knows: %s", error)
            return []
        return sorted(known, key=lambda one: not one.cached)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Terminate the worker, and kill it after a time-out. The next worker takes its job."""
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
            how = self._run_once()
            if self._stopping.is_set():
                return
            short_lives = 0 if self._clock() - started > _LONG_LIFE_S else short_lives + 1
            if short_lives >= MAX_SHORT_LIVES:
                log.error(
                    "the trainer ended %s times in a row and is not restarted; the last time it %s",
                    short_lives,
                    how,
                )
                return
            pause_s = min(_LONGEST_PAUSE_S, self._first_pause_s * 2 ** (short_lives - 1))
            log.warning("the trainer %s; it starts again in %.0f s", how, pause_s)
            self._stopping.wait(pause_s)

    def _run_once(self) -> str:
        """Run the worker, and return how it ended. Copy its stderr to the server's, and keep the
        last lines for the log."""
        with self._lock:
            if self._stopping.is_set():
                return "was stopped"
            try:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            except OSError as error:
                return f"cannot be started: {error.strerror}"
        with suppress(OSError):  # it may have ended already
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
        log.info("the trainer runs as process %s", self._process.pid)
        stream, self._process.stderr = self._process.stderr, None
        said = StderrTail(stream, echo=_STDERR)
        with self._process:  # closes its pipe at the end
            code = self._process.wait()
        said.join(STOP_S)  # a child of its own may hold the stream open
        return ending(code, said.kept)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
