"""Make the engine that serves, and list and measure those that `--backend auto` may take.

A child process measures the candidates (`measure.py`): all torch work of a process belongs to one
thread, and a server must survive instructions that kill a process. docs/adr/098 has the reasons.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

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
    table,
)
from model_store.host.children import ending, last_words
from model_store.precision import Asked, Trial, disagreement, try_out
from model_store.records.manifest import Manifest
from model_store.records.quality import Reduced

LONGEST_S = 3600.0
"""Seconds after which a measurement is given up."""
PACKED_COPIES = 2
"""Copies of the weights in each version in memory, one for each session."""
PACKED_SHARE = 0.25
"""Share of the free memory that packed weights may take, with all resident versions."""

log = logging.getLogger("dne_serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The settings that decide about an engine."""

    threads: int | None
    max_batch: int
    precision: Asked
    resident: int = 1
    """Versions in memory at most."""
    room_bytes: int | None = None
    """Free memory; None where it is unknown."""


def choose_engine(
    backend: str,
    *,
    device: str,
    threads: int | None,
    max_batch: int = 1,
    precision: Asked = "auto",
    pack: bool = False,
    choice: str = "",
    try_out: Callable[..., Trial] = try_out,
) -> Engine:
    """Make an engine. `choice` is the reason for it, in words."""
    # Imported here, because torch and onnxruntime take seconds.
    if backend == "onnx":
        from dne_serve.engines.onnx_engine import OnnxEngine

        return OnnxEngine(
            device=device,
            threads=threads,
            precision=precision,
            pack=pack,
            choice=choice or "onnx: asked for",
            try_out=try_out,
        )
    from dne_serve.engines.torch_engine import TorchEngine

    return TorchEngine(
        device=device,
        threads=threads,
        max_batch=max_batch,
        precision=precision,
        choice=choice or "torch: asked for",
        try_out=try_out,
    )


def make_candidate(
    one: Candidate, *, threads: int | None, max_batch: int, choice: str = ""
) -> Engine:
    """Make the engine of a candidate, which was measured or is about to be: its precision runs, or
    a child process dies of it."""
    return choose_engine(
        one.backend,
        device="cpu",
        threads=threads,
        max_batch=max_batch,
        precision=one.precision,
        pack=one.packed,
        choice=f"{one.name}: {choice}",
        try_out=_runs,
    )


def _runs(precision: Reduced, *, device: str = "cpu") -> Trial:
    return Trial(runs=True)


def candidates_for(wanted: Wanted, served: Manifest | None) -> tuple[Candidate, ...]:
    """List the candidates that may serve a version. Only single precision is safe for any."""
    has_onnx = importlib.util.find_spec("onnxruntime") is not None
    found = (one for one in CANDIDATES if one.backend == "torch" or has_onnx)
    return tuple(
        one
        for one in found
        if wanted.precision in ("auto", one.precision)
        and (not one.packed or _has_room(wanted, served))
        and (one.precision == "fp32" or _agrees(one.precision, wanted, served))
    )


def _agrees(precision: Reduced, wanted: Wanted, served: Manifest | None) -> bool:
    if wanted.precision == precision:
        return True  # asked for by name; a version that does not agree is computed otherwise
    return served is not None and disagreement(precision, served.metrics.agreement) is None


def _has_room(wanted: Wanted, served: Manifest | None) -> bool:
    if served is None:
        return False
    copies = PACKED_COPIES * wanted.resident * 4 * served.spec.parameters
    return wanted.room_bytes is None or copies <= PACKED_SHARE * wanted.room_bytes


def request_for(wanted: Wanted, served: Manifest) -> Request:
    return Request(
        network=served.network,
        experts=served.spec.experts,
        candidates=candidates_for(wanted, served),
        threads=ThreadPlan.of(threads=wanted.threads, workers=None).threads,
        max_batch=wanted.max_batch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEngines:
    """The result of a measurement."""

    figures: Figures = field(default_factory=dict)
    quiet: bool = False
    """No other program wanted the processor meanwhile."""
    fault: str = ""
    """The reason why there are no figures."""
    excluded: tuple[str, ...] = ()
    """Names of candidates that a child process has died of."""

    def best(self, request: Request) -> Candidate:
        return fastest(self.figures, request.candidates)

    @property
    def told(self) -> str:
        busy = "" if self.quiet else ", beside other programs"
        died = f"; {' and '.join(self.excluded)} did not run" if self.excluded else ""
        return f"measured as the fastest{busy}; {table(self.figures)}{died}"


class Measuring:
    """A measurement in child processes, one after another if a candidate kills one."""

    def __init__(self, asked: Measurement) -> None:
        self._asked = asked
        self._child: subprocess.Popen[str] | None = None
        self._stopped = False

    def run(self) -> MeasuredEngines:
        """Measure, and remember the choice if the machine was quiet. Blocks for long."""
        asked = self._asked
        while not self._stopped:
            measured, killer = self._once(asked)
            if killer is None or killer in asked.excluded:
                if measured.quiet:
                    remember_choice(asked.request, measured.best(asked.request))
                return measured
            log.warning("%s does not run here, and is not measured further", killer)
            asked = asked.model_copy(update={"excluded": (*asked.excluded, killer)})
        return MeasuredEngines(fault="the server stops")

    def stop(self) -> None:
        self._stopped = True
        if self._child is not None:
            self._child.kill()

    def _once(self, asked: Measurement) -> tuple[MeasuredEngines, str | None]:
        """Run a child. Give what it has found, and the candidate that it died of."""
        self._child = begin_child(asked)
        if self._stopped:  # while the child was started
            self._child.kill()
        try:
            said, errors = self._child.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            said, errors = self._child.communicate()
        code = self._child.returncode
        if errors and not self._stopped:
            level = logging.WARNING if code else logging.INFO
            log.log(level, "the measurement of engines %s: %s", ending(code), last_words(errors))
        lines = [json.loads(one) for one in said.splitlines(keepends=True) if one.endswith("\n")]
        figures = [one for one in lines if "figures" in one]
        tried = [one["trying"] for one in lines if "trying" in one]
        if code and not self._stopped and tried:
            return MeasuredEngines(), tried[-1]
        if not figures:
            return MeasuredEngines(fault=f"the measurement {ending(code, errors)}"), None
        last = figures[-1]
        return MeasuredEngines(
            figures=last["figures"], quiet=last["quiet"], excluded=asked.excluded
        ), None


def begin_child(asked: Measurement) -> subprocess.Popen[str]:
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
