"""Choose the precision of a version: the fastest that runs here and agrees with single precision.

A child process tries the instructions first, because virtual machines advertise some that kill the
process. The manifest says how far the answers agree.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from model_store.errors import WrongUsage
from model_store.host.children import last_line, last_words, signal_name
from model_store.host.machine import MAX_REMEMBERED_BYTES, UNREADABLE, machine_digest, remember
from model_store.host.private import read_private
from model_store.records.quality import Reduced
from model_store.store.cache import cache_folder
from model_store.tables import percent

Precision = Literal["fp32", "bf16", "int8"]
Asked = Literal["auto", "fp32", "bf16", "int8"]

_MIN_AGREEMENT = 0.96
"""Shifting photos by one pixel gives 0.91, and loses nothing: see docs/adr/103."""
_TRIAL_S = 60.0
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
class PrecisionChoice:
    """The chosen precision. `refused` says why other candidates may not be used."""

    precision: Precision
    refused: tuple[str, ...] = ()


def choose(
    agreement: Mapping[Reduced, float],
    *,
    asked: Asked,
    offered: Sequence[Reduced],
    try_out: Callable[[Reduced], Trial],
) -> PrecisionChoice:
    """Choose the precision for a version with this agreement, among those of the backend.

    `auto` takes the fastest that is allowed. A precision asked for by name is taken if allowed,
    even if it is slower. Otherwise single precision is taken.
    """
    wanted = tuple(precision for precision in offered if asked in ("auto", precision))
    refused: list[str] = []
    passed: dict[Reduced, Trial] = {}
    for precision in wanted:
        reason = disagreement(precision, agreement)
        trial = None if reason else try_out(precision)
        if trial is not None and trial.runs:
            passed[precision] = trial
        else:
            refused.append(
                reason or f"{precision} does not run here: {trial.reason if trial else ''}"
            )
    best = max(passed, key=lambda precision: passed[precision].speedup, default=None)
    if best is None or (asked == "auto" and passed[best].speedup <= 1):
        return PrecisionChoice(precision="fp32", refused=tuple(refused))
    return PrecisionChoice(precision=best, refused=tuple(refused))


def disagreement(precision: Reduced, agreement: Mapping[Reduced, float]) -> str | None:
    """Explain why a version may not be computed in a precision. None if it may."""
    share = agreement.get(precision)
    if share is None:
        return f"{precision} was not compared with single precision when it was published"
    if not share:
        return f"{precision} was less accurate than single precision on held-out images"
    if share < _MIN_AGREEMENT:
        return (
            f"{precision} agrees with single precision to {percent(share)} only on held-out "
            f"images, and {percent(_MIN_AGREEMENT)} are needed"
        )
    return None


def try_out(precision: Reduced, *, device: str = "cpu") -> Trial:
    """Try a precision on this machine, or take the remembered result. int8 always tries the CPU."""
    where = [] if precision == "int8" or device == "cpu" else [device]
    name = " on ".join([precision, *where])
    remembered = remembered_trial(name)
    if remembered is not None:
        return remembered
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
    known.setdefault(machine, {})[name] = trial
    trials = TypeAdapter(Known).dump_python(known, exclude={"__all__": {"__all__": {"lasting"}}})
    remember(path, trials)


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


def try_in_child(command: Sequence[str], *, timeout_s: float = _TRIAL_S) -> Trial:
    """Run a command that prints the speed-up on its last line. Its death is a result."""
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


Known = dict[str, dict[str, Trial]]
"""Trials by machine, then by precision and device."""


def _remembered(path: Path) -> Known:
    """Read the trials of earlier starts. A damaged file costs a new trial."""
    try:
        held = read_private(path, max_bytes=MAX_REMEMBERED_BYTES)
        return TypeAdapter(Known).validate_json(held, strict=True)
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        log.warning("%s cannot be used, and precisions are tried again: %s", path, error)
        return {}
