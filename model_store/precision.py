"""Choose the precision of a version: the fastest that runs here and agrees with single precision.

A child process tries the instructions first, because virtual machines advertise some that kill the
process. The manifest says how often the answers agree.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from model_store.errors import WrongUsage
from model_store.host.children import last_line, last_words, signal_name
from model_store.host.machine import UNREADABLE, machine_digest, read_remembered, remember
from model_store.records.quality import Reduced
from model_store.store.cache import cache_folder
from model_store.tables import percent

Precision = Literal["fp32", "bf16", "int8"]
Asked = Literal["auto", "fp32", "bf16", "int8"]

MIN_AGREEMENT = 0.99
TRIAL_S = 60.0
TRIALS: Mapping[Reduced, str] = {
    "bf16": "model_store.inference.bf16_trial",
    "int8": "model_store.onnx.int8_trial",
}
"""The module that a child process runs for each precision."""
REMEMBERED = "precision.json"

log = logging.getLogger("model_store.precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of trying a precision on this machine in a child process.

    `speedup` is relative to single precision. A precision that does not run has 0 and a `reason`.
    """

    runs: bool
    speedup: float = 0.0
    reason: str = ""
    lasting: bool = True
    """True if another trial would have the same result, so that it is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen precision. `refused` says why other candidates may not be used."""

    precision: Precision
    refused: tuple[str, ...] = ()


def choose(
    agreement: Mapping[Reduced, float],
    *,
    asked: Asked,
    offered: Sequence[Reduced],
    try_out: Callable[[Reduced], Trial],
) -> Choice:
    """Choose the precision for a version with this agreement, among those of the backend.

    `auto` takes the fastest that is allowed. A precision asked for by name is taken if allowed,
    even if it is slower. Otherwise single precision is taken.
    """
    wanted = tuple(one for one in offered if asked in ("auto", one))
    refused: list[str] = []
    passed: dict[Reduced, Trial] = {}
    for one in wanted:
        reason = disagreement(one, agreement)
        trial = None if reason else try_out(one)
        if trial is not None and trial.runs:
            passed[one] = trial
        else:
            refused.append(reason or f"{one} does not run here: {trial.reason if trial else ''}")
    best = max(passed, key=lambda one: passed[one].speedup, default=None)
    if best is None or (asked == "auto" and passed[best].speedup <= 1):
        return Choice(precision="fp32", refused=tuple(refused))
    return Choice(precision=best, refused=tuple(refused))


def disagreement(precision: Reduced, agreement: Mapping[Reduced, float]) -> str | None:
    """Explain why a version may not be computed in a precision. None if it may."""
    share = agreement.get(precision)
    if share is None:
        return f"{precision} was not compared with single precision when it was published"
    if share < MIN_AGREEMENT:
        return (
            f"{precision} agrees with single precision on {percent(share)} of held-out images "
            f"only, and {percent(MIN_AGREEMENT)} are needed"
        )
    return None


def try_out(precision: Reduced, *, device: str = "cpu") -> Trial:
    """Try a precision on this machine, or take the remembered result. int8 always tries the CPU."""
    where = [] if precision == "int8" or device == "cpu" else [device]
    name = " on ".join([precision, *where])
    found = remembered_trial(name)
    if found is not None:
        return found
    trial = try_in_child([sys.executable, "-m", TRIALS[precision], precision, *where])
    log.info("precision %s: %s", name, trial)
    if trial.lasting:
        remember_trial(name, trial)
    return trial


def remembered_trial(name: str) -> Trial | None:
    """Read what an earlier trial found out: `int8`, `bf16` or `bf16 on cuda`."""
    return _remembered(cache_folder() / REMEMBERED).get(machine_digest(), {}).get(name)


def remember_trial(name: str, trial: Trial) -> None:
    path, machine = cache_folder() / REMEMBERED, machine_digest()
    known = _remembered(path)
    _remember(path, {**known, machine: {**known.get(machine, {}), name: trial}})


def refuse_unless_it_runs(
    asked: Asked,
    *,
    offered: Sequence[Reduced],
    backend: str,
    try_out: Callable[[Reduced], Trial] = try_out,
) -> None:
    """Raise WrongUsage if a precision that was asked for by name is not available here."""
    if asked == "auto" or asked == "fp32":
        return
    if asked not in offered:
        raise WrongUsage(f"precision {asked} was asked for, and the backend {backend} has none")
    trial = try_out(asked)
    if not trial.runs:
        raise WrongUsage(f"precision {asked} was asked for, and does not run here: {trial.reason}")


def try_in_child(command: Sequence[str], *, timeout_s: float = TRIAL_S) -> Trial:
    """Run a command that prints the speed-up on its last line. Its death is a result, no error."""
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Trial(runs=False, reason=f"it took longer than {timeout_s:g} s", lasting=False)
    except OSError as error:
        return Trial(runs=False, reason=f"it cannot be tried: {error.strerror}", lasting=False)
    if ended.returncode < 0:
        number = -ended.returncode
        reason = f"the processor or the system ended it ({signal_name(number)})"
        return Trial(runs=False, reason=reason, lasting=number == signal.SIGILL)
    try:
        speedup = float(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        log.warning("a trial of a precision failed: %s", last_words(ended.stderr))
        reason = last_line(ended.stderr) or "it said nothing"
        return Trial(runs=False, reason=reason, lasting=False)
    return Trial(runs=True, speedup=round(speedup, 3))


Known = Mapping[str, Mapping[str, Trial]]
"""Trials by machine, then by precision and device."""


def _remembered(path: Path) -> Known:
    """Read the trials of earlier starts. A damaged file costs a new trial."""
    try:
        told = read_remembered(path)
        return {
            machine: {name: _trial(one) for name, one in trials.items()}
            for machine, trials in told.items()
        }
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        log.warning("%s cannot be used, and precisions are tried again: %s", path, error)
        return {}


def _trial(told: Mapping[str, object]) -> Trial:
    runs, speedup, reason = (told.get(name) for name in ("runs", "speedup", "reason"))
    if not (
        isinstance(runs, bool) and isinstance(speedup, int | float) and isinstance(reason, str)
    ):
        raise TypeError("a trial is written in another way")
    return Trial(runs=runs, speedup=float(speedup), reason=reason)


def _remember(path: Path, known: Known) -> None:
    remember(
        path,
        {
            machine: {name: _told(trial) for name, trial in trials.items()}
            for machine, trials in known.items()
        },
    )


def _told(trial: Trial) -> dict[str, object]:
    return {name: value for name, value in asdict(trial).items() if name != "lasting"}
