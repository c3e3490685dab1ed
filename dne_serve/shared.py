"""Make the parts that all models of a server share, and start and stop them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from dne_serve.access.audit import Audit
from dne_serve.access.auth import Authorizer, is_for_this_machine
from dne_serve.access.permission import TokenSource
from dne_serve.engines.base import Engine, joined
from dne_serve.errors import NotEnoughMemory
from dne_serve.inference.answers import AnswerBuilder
from dne_serve.inference.decode_process import DecodeProcess
from dne_serve.inference.decode_worker import Reencoded
from dne_serve.inference.decoding import Decoder, FairTurns
from dne_serve.inference.store_threads import StoreThreads
from dne_serve.observe.live import Listener
from dne_serve.observe.metrics import ServerMetrics
from dne_serve.observe.tracing import make_tracer
from dne_serve.rollout.engine_switch import Auto, EngineSwitch, Subject
from dne_serve.rollout.loaded_versions import EngineRoom, ImageBatcher, ImageTicket, bytes_of
from dne_serve.rollout.memory import MemoryCheck, pass_bytes
from dne_serve.settings import Settings
from dne_serve.webhooks.outbox import Announcer
from model_store.records.manifest import Manifest
from model_store.spec import NetworkSpec

STORE_READS = 4
"""Requests that read the store at a time."""
_STORE_LABELS = 2
"""Requests that write or delete labels at a time."""
_STORE_MOVES = 2
"""Requests that move the channel, or load and unload, at a time."""
_WRITER_NICENESS = 15
MAX_WAITING = 64
"""Requests of each kind that wait; more are answered with 503."""


class Reencoder:
    """A process that writes pictures anew for all inboxes, one at a time. It gives way to all
    others."""

    def __init__(self, process: DecodeProcess) -> None:
        self._process = process
        self._turn = threading.Lock()

    def reencode(self, data: bytes) -> Reencoded:
        with self._turn:
            return self._process.reencode(data)

    def stop(self) -> None:
        """End the process, which begins again with the next picture."""
        with self._turn:
            self._process.stop()


class Shared:
    """Engine, batches, threads, permissions, metrics and webhooks of one server."""

    def __init__(
        self,
        settings: Settings,
        *,
        engine: Engine,
        auto: Auto | None,
        subject: Callable[[], Subject | None],
        give_way: Callable[[str | None], bool],
    ) -> None:
        """`subject` is the version by which engines are measured. `give_way` lets go of
        another model than the named one, and returns whether there was one."""
        self.settings = settings
        self.drains = False
        self.listeners: list[Listener] = []
        """The live views that are open, of all models."""
        self.keys = settings.read_keys()
        self._give_way = give_way
        self.metrics = ServerMetrics(by_model=settings.models is not None)
        self.metrics.queue_limit.set(settings.max_queue)
        self.tracer = make_tracer(settings, on_outcome=self.metrics.traced)
        self.authorizer = Authorizer(TokenSource(settings), is_local=is_for_this_machine(settings))
        self.audit = Audit(settings.audit_log)
        self.webhooks = Announcer(settings, on_outcome=self.metrics.posted)
        self._make_pools()
        self._hold_engine(engine)
        self._engines = None
        if auto is not None:
            self._engines = EngineSwitch(
                auto, room=self.room, subject=subject, on_switch=self._tell_engine
            )
        self._tell_engine()

    @property
    def engine(self) -> Engine:
        """Return the engine that answers."""
        return self.room.engine

    @property
    def measures(self) -> bool:
        """Return whether engines are being measured beside the server."""
        return self._engines is not None and self._engines.is_measuring

    @property
    def is_held(self) -> bool:
        """Return whether the store has not answered requests that were under way at the stop."""
        return self.readers.is_busy or self.labellers.is_busy

    def start(self) -> None:
        self.batcher.start()
        if self.tracer is not None:
            self.tracer.start()
        if self.webhooks.is_heard:
            self.webhooks.start()

    def measure(self) -> None:
        """Measure engines from now on."""
        if self._engines is not None:
            self._engines.start()

    def stop_measuring(self) -> None:
        if self._engines is not None:
            self._engines.stop()

    def stop_threads(self) -> None:
        """Begin no more work for requests. Moves under way still need the engine."""
        self.readers.stop(wait=False)
        self.labellers.stop(wait=False)
        self.movers.stop(wait=True)

    def stop(self) -> None:
        self.decoder.stop()
        self.batcher.stop()
        self.answers.stop()
        self.audit.close()
        if self.webhooks.is_heard:
            self.webhooks.stop()
        if self.tracer is not None:
            self.tracer.stop()

    def admit(self, manifest: Manifest, *, model: str | None) -> None:
        """Refuse a version before any byte of it is read. Where memory is short, the models that
        were not asked for longest give way to this one."""
        while True:
            try:
                self.memory.check(manifest)
            except NotEnoughMemory:
                if not self._give_way(model):
                    raise
            else:
                if self._fits(manifest) or not self._give_way(model):
                    return

    def _fits(self, manifest: Manifest) -> bool:
        """Return whether all models and this version keep to the limit on bytes."""
        most = self.settings.max_model_bytes
        return most is None or bytes_of([*self.room.manifests, manifest]) <= most

    def _make_pools(self) -> None:
        """Make the threads and processes that keep long work off the event loop."""
        settings, fixed = self.settings, self.settings.fixed
        self.decoder = Decoder(
            threads=fixed.decode_threads,
            seconds=fixed.decode_seconds,
            max_pixels=settings.max_pixels,
            max_queue=settings.max_queue,
            max_images=settings.max_images,
        )
        self.turns = None
        """Turns of the models at decoding, where there are many."""
        if settings.models is not None:
            self.turns = FairTurns(self.decoder.lanes)
        self.reencoder = Reencoder(
            DecodeProcess(
                seconds=fixed.decode_seconds,
                max_pixels=settings.max_pixels,
                niceness=_WRITER_NICENESS,
            )
        )
        self.answers = AnswerBuilder()
        wait_s = settings.max_wait_seconds
        self.readers = StoreThreads(
            "store", threads=STORE_READS, waiting=MAX_WAITING, max_wait_s=wait_s
        )
        self.labellers = StoreThreads(
            "label", threads=_STORE_LABELS, waiting=MAX_WAITING, max_wait_s=wait_s
        )
        self.movers = StoreThreads("move", threads=_STORE_MOVES, waiting=MAX_WAITING)

    def _hold_engine(self, engine: Engine) -> None:
        settings = self.settings
        self.batcher = ImageBatcher(
            lambda widest, queries: self.engine.run(widest, queries),
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            workers=engine.workers,
            on_batch=self.metrics.ran,
            on_ran=self._ran,
            join=joined,
        )
        self.room = EngineRoom(engine, batcher=self.batcher)
        self.memory = MemoryCheck(lambda: self.room.manifests, pass_bytes=self._pass_bytes)

    def _pass_bytes(self, spec: NetworkSpec) -> int:
        """Bytes of the machine's own memory that passes over the largest batches take."""
        if self.engine.device != "cpu":
            return 0
        return pass_bytes(
            spec,
            batch=self.settings.max_batch,
            backend=self.engine.backend,
            workers=self.engine.workers,
        )

    def _ran(self, tickets: Sequence[ImageTicket], began_ns: int, ended_ns: int) -> None:
        """Time a batch and its images, each for itself where a trace wants to know."""
        waits_ns = (began_ns - ticket.arrived_ns for ticket in tickets)
        self.metrics.computed(waits_ns=waits_ns, run_ns=ended_ns - began_ns)
        for ticket in tickets:
            if ticket.item.watch is not None:
                ticket.item.watch.ran(ticket.arrived_ns, began_ns, ended_ns)

    def _tell_engine(self) -> None:
        engine = self.engine
        self.metrics.built(
            backend=engine.backend,
            device=engine.device,
            engine=engine.choice.partition(":")[0],
        )
