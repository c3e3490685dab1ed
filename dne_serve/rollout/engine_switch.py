"""Measure engines for the served version beside the server, and switch to the fastest one.

The server starts with a safe engine and is ready at once. A version of another shape, or one that
agrees in another precision, is measured again; what is known of this machine is not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dne_serve.engines.candidates import Candidate, Measurement, Request, remembered
from dne_serve.engines.choose import MeasuredEngines, Measuring, Wanted, make_candidate, request_for
from dne_serve.errors import public_message
from dne_serve.rollout.loaded_versions import EngineRoom
from dne_serve.rollout.memory import available_bytes, pass_bytes
from model_store.records.manifest import Manifest

LOOK_S = 0.5
"""Seconds between two looks at the served version."""
AGAIN_S = 60.0
"""Seconds until engines are measured again that could not be, or on a busy machine; doubled each
time up to _LONGEST_AGAIN_S."""
_LONGEST_AGAIN_S = 3600.0
NICENESS = 15
"""Of the child process that measures: a busy server leaves it a small share of a core."""
COPIES = 8
"""Copies of the weights that all measured engines hold together."""
EARLIER = "measured as the fastest at an earlier start"

log = logging.getLogger("dne_serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """The choice that is left to the server, and the candidate that serves meanwhile."""

    wanted: Wanted
    candidate: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A served version, by which engines are measured, and the location of its store."""

    manifest: Manifest
    location: str


class EngineSwitch:
    """A thread that measures and switches."""

    def __init__(
        self,
        auto: Auto,
        *,
        room: EngineRoom,
        subject: Callable[[], Subject | None],
        on_switch: Callable[[], None] = lambda: None,
    ) -> None:
        self._wanted, self._candidate = auto.wanted, auto.candidate
        self._room, self._subject = room, subject
        self._on_switch = on_switch
        self._settled: Request | None = None
        self._again_at: float | None = None
        self._again_s = AGAIN_S
        self._measuring: Measuring | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="measuring", daemon=True)

    @property
    def is_measuring(self) -> bool:
        return self._measuring is not None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if (measuring := self._measuring) is not None:
            measuring.stop()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(LOOK_S):
            subject = self._subject()
            if subject is None:
                continue
            try:
                self.look(subject)
            except Exception as error:  # the engine that serves goes on
                log.error("engines could not be measured: %s", error, exc_info=error)
                self._later(f"not measured: {public_message(error)}")

    def look(self, subject: Subject) -> None:
        """Choose the engine for a version, unless that is done."""
        request = request_for(self._wanted, subject.manifest)
        is_due = self._again_at is not None and time.monotonic() >= self._again_at
        if request == self._settled and not is_due:
            return
        if request != self._settled:
            self._again_s = AGAIN_S
        self._settled, self._again_at = request, None
        if len(request.candidates) == 1:
            self._take(request.candidates[0], "nothing else is allowed here")
        elif (kept := remembered(request)) is not None:
            self._take(kept, EARLIER)
        elif not fits(subject.manifest, max_batch=self._wanted.max_batch):
            self._later("not measured, as there is too little free memory for it")
        else:
            self._measure(request, subject)

    def _measure(self, request: Request, subject: Subject) -> None:
        measured = self._run(
            Measurement(
                store=subject.location,
                version=subject.manifest.version,
                digest=subject.manifest.digest,
                request=request,
                niceness=NICENESS,
            )
        )
        if self._stop.is_set():
            return
        if measured.figures:
            self._take(measured.best(request), measured.told)
        if not measured.quiet:
            self._later(f"not measured, as {measured.fault}" if measured.fault else None)

    def _run(self, asked: Measurement) -> MeasuredEngines:
        self._measuring = Measuring(asked)
        try:
            if self._stop.is_set():
                return MeasuredEngines(fault="the server stops")
            return self._measuring.run()
        finally:
            self._measuring = None

    def _take(self, one: Candidate, why: str) -> None:
        """Switch to a candidate, or say why the one that serves stays."""
        if one != self._candidate:
            engine = make_candidate(
                one, threads=self._wanted.threads, max_batch=self._wanted.max_batch
            )
            self._room.switch(engine)
            self._candidate = one
        self._tell(why)
        self._on_switch()

    def _tell(self, why: str) -> None:
        self._room.engine.choice = f"{self._candidate.name}: {why}"
        log.info("engine %s", self._room.engine.choice)

    def _later(self, why: str | None) -> None:
        if why is not None:
            self._tell(why)
        self._again_at = time.monotonic() + self._again_s
        self._again_s = min(_LONGEST_AGAIN_S, 2 * self._again_s)


def fits(served: Manifest, *, max_batch: int) -> bool:
    """Return whether all candidates fit into memory beside the server."""
    needed = pass_bytes(served.spec, batch=max_batch, backend="onnx", workers=2)
    available = available_bytes()
    return available is None or needed + COPIES * 4 * served.spec.parameters < available
