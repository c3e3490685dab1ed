"""Make the engine that serves, and with `--backend auto` take the fastest one for this machine.

A child process measures the candidates (`measure.py`): all torch work of a process belongs to one
thread, and a server must survive instructions that kill a process. docs/adr/042 has the reasons.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dne_serve.engines.base import Engine
from dne_serve.engines.candidates import (
    CANDIDATES,
    Candidate,
    Figures,
    Measurement,
    Request,
    ThreadPlan,
    fastest,
    remember_choice,
    remembered,
    table,
)
from model_store.errors import DneError
from model_store.host.children import ending, last_words
from model_store.host.machine import usable_cores
from model_store.precision import Asked, Trial, disagreement, remember_trial, remembered_trial
from model_store.records.manifest import Manifest
from model_store.records.quality import Reduced
from model_store.store.store import Store

MEASURE_S = 5.0
"""Seconds for which readiness waits for the measurement."""
MARGIN_S = 0.5
"""Seconds between the end of the measurement and the end of the wait."""
MEASURED_EXPERTS = 3
"""Experts of a measured network at most: more would not be measured in time."""
PACKED_COPIES = 2
"""Copies of the weights in each version in memory, one for each session."""
PACKED_SHARE = 0.25
"""Share of the free memory that packed weights may take, with all resident versions."""

log = logging.getLogger("dne_serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The settings that decide about an engine."""

    device: str
    threads: int | None
    max_batch: int
    precision: Asked
    resident: int = 1
    """Versions in memory at most."""
    room_bytes: int | None = None
    """Free memory; None where it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    candidate: Candidate
    why: str

    @property
    def told(self) -> str:
        return f"{self.candidate.name}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """A child process that measures."""

    request: Request
    child: subprocess.Popen[str]

    def choice(self) -> Choice:
        """Wait for the child, for MEASURE_S at most."""
        silent = f"as {MEASURE_S:g} s were too short for it"
        try:
            said, errors = self.child.communicate(timeout=MEASURE_S)
        except subprocess.TimeoutExpired:
            return _decide(self.request, self.end(), silent=silent)
        if code := self.child.returncode:
            silent = f"as the measurement {ending(code, errors)}"
            told = last_words(errors) or "it said nothing"
            log.warning("the measurement of engines %s: %s", ending(code), told)
        return _decide(self.request, said, silent=silent)

    def end(self) -> str:
        """Kill the child, and give what it has said."""
        self.child.kill()
        said, _ = self.child.communicate()
        return said


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """A choice that was made, or one that is being measured."""

    wanted: Wanted
    found: Choice | Measuring

    def engine(self) -> Engine:
        choice = self.choice()
        log.info("engine %s", choice.told)
        one = choice.candidate
        return choose_engine(
            one.backend,
            device="cpu" if one.backend == "onnx" else self.wanted.device,
            threads=self.wanted.threads,
            max_batch=self.wanted.max_batch,
            precision=self.wanted.precision,
            workers=one.workers,
            pack=one.packed,
            choice=choice.told,
        )

    def choice(self) -> Choice:
        """Give the choice. A GPU is looked for after the measurement began, as torch takes seconds
        to import."""
        if _has_gpu(self.wanted.device):
            if isinstance(self.found, Measuring):
                self.found.end()
            return Choice(candidate=Candidate("torch"), why="there is a GPU")
        return self.found.choice() if isinstance(self.found, Measuring) else self.found


def choose_engine(
    backend: str,
    *,
    device: str,
    threads: int | None,
    max_batch: int = 1,
    precision: Asked = "auto",
    workers: int | None = None,
    pack: bool = False,
    choice: str = "",
) -> Engine:
    """Make an engine. `choice` is the reason for it, in words."""
    # Imported here, because torch and onnxruntime take seconds.
    if backend == "onnx":
        from dne_serve.engines.onnx_engine import OnnxEngine

        return OnnxEngine(
            device=device,
            threads=threads,
            precision=precision,
            workers=workers,
            pack=pack,
            choice=choice or "onnx: asked for",
        )
    from dne_serve.engines.torch_engine import TorchEngine

    return TorchEngine(
        device=device,
        threads=threads,
        max_batch=max_batch,
        precision=precision,
        choice=choice or "torch: asked for",
    )


def begin_choosing(wanted: Wanted, *, served: Manifest | None) -> Choosing:
    """Begin to choose among the engines that may serve a version; None: none can be measured."""
    candidates = _allowed(wanted, served)
    if len(candidates) == 1:
        found: Choice | Measuring = Choice(candidate=candidates[0], why=_only(wanted))
    elif served is None:
        found = _unmeasured(candidates, "as there is no version that could be")
    else:
        request = _request(wanted, served, candidates)
        kept = remembered(request)
        why = "measured as the fastest at an earlier start"
        found = (
            Measuring(request=request, child=_measure(request))
            if kept is None
            else Choice(candidate=kept, why=why)
        )
    return Choosing(wanted=wanted, found=found)


def served_by(store: Store | None, *, channel: str) -> Manifest | None:
    """Read the version that the channel names, if it can be read: serving it reports the fault."""
    if store is None:
        return None
    try:
        record = store.head(channel)
        return None if record is None else store.resolve(record)
    except DneError:
        return None


def _allowed(wanted: Wanted, served: Manifest | None) -> tuple[Candidate, ...]:
    if wanted.precision == "bf16" or importlib.util.find_spec("onnxruntime") is None:
        return (CANDIDATES[0],)
    found: tuple[Candidate, ...] = CANDIDATES[1:] if wanted.precision == "int8" else CANDIDATES
    threads = ThreadPlan.of(threads=wanted.threads, workers=None).threads
    found = tuple(one for one in found if one.workers <= threads)
    if served is not None and wanted.room_bytes is not None:
        copies = PACKED_COPIES * wanted.resident * 4 * served.spec.parameters
        if copies > PACKED_SHARE * wanted.room_bytes:
            found = tuple(one for one in found if not one.packed)
    return found


def _has_gpu(device: str) -> bool:
    if device == "cpu":
        return False
    from model_store.network.device import choose_device  # here, because torch takes seconds

    return choose_device(device).type != "cpu"


def _only(wanted: Wanted) -> str:
    if wanted.precision == "bf16":
        return "precision bf16 was asked for"
    return "onnxruntime is not installed"


def _request(wanted: Wanted, served: Manifest, candidates: tuple[Candidate, ...]) -> Request:
    reduced: tuple[Reduced, ...] = tuple(
        one for one in ("int8", "bf16") if _computes_in(one, wanted, served)
    )
    return Request(
        network=served.network,
        experts=served.spec.experts[:MEASURED_EXPERTS],
        candidates=candidates,
        reduced=reduced,
        threads=ThreadPlan.of(threads=wanted.threads, workers=None).threads,
        max_batch=wanted.max_batch,
    )


def _computes_in(precision: Reduced, wanted: Wanted, served: Manifest) -> bool:
    """Return whether an engine will compute the version so. 8 bits that nobody has tried here are
    tried by the measurement; 16 bits are not, as few processors run them fast."""
    if wanted.precision not in ("auto", precision):
        return False
    if disagreement(precision, served.metrics.agreement) is not None:
        return False
    trial = remembered_trial(precision)
    if trial is None:
        return precision == "int8"
    return trial.runs and (trial.speedup > 1 or wanted.precision == precision)


def _measure(request: Request) -> subprocess.Popen[str]:
    try_int8 = "int8" in request.reduced and remembered_trial("int8") is None
    asked = Measurement(request=request, seconds=MEASURE_S - MARGIN_S, try_int8=try_int8)
    command = [sys.executable, "-m", "dne_serve.engines.measure", asked.model_dump_json()]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for the server, which ends the child itself
    )


def _decide(request: Request, said: str, *, silent: str) -> Choice:
    """Take the fastest candidate of the last line that the child process has finished. `silent`
    is the reason where it has finished none."""
    lines = [line for line in said.splitlines(keepends=True) if line.endswith("\n")]
    if not lines:
        return _unmeasured(request.candidates, silent)
    told = json.loads(lines[-1])
    figures: Figures = told["figures"]
    best = fastest(figures, request.candidates)
    if told["int8_speedup"] is not None:
        remember_trial("int8", Trial(runs=True, speedup=round(told["int8_speedup"], 3)))
    if told["enough"] and not _is_busy():
        remember_choice(request, best)
    return Choice(candidate=best, why=f"measured as the fastest; {table(figures)}")


def _is_busy() -> bool:
    """Return whether other programs want all cores: figures of such a moment are not kept."""
    return os.getloadavg()[0] > usable_cores()


def _unmeasured(candidates: Sequence[Candidate], why: str) -> Choice:
    """Take the most workers without packed weights: the fastest but for packing in ADR 018."""
    best = max((one for one in candidates if not one.packed), key=lambda one: one.workers)
    return Choice(candidate=best, why=f"not measured, {why}")
