"""Put the parts of a server together, and start and stop them in the right order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from dne_serve.access.audit import Audit
from dne_serve.access.auth import Door
from dne_serve.access.startup_checks import is_loopback
from dne_serve.access.tokens import TokenSource
from dne_serve.collecting.collector import Collector
from dne_serve.collecting.desk import Desk
from dne_serve.collecting.writer import Caps, Writer
from dne_serve.engines.base import Engine, joined
from dne_serve.errors import NotServed, tell
from dne_serve.inference.answers import AnswerBuilder
from dne_serve.inference.decode_process import DecodeProcess
from dne_serve.inference.decoding import Decoder
from dne_serve.inference.predictor import Predictor
from dne_serve.inference.store_threads import StoreThreads
from dne_serve.rollout.canary import Companions
from dne_serve.rollout.followed_store import SameStore
from dne_serve.rollout.footprint import pass_bytes
from dne_serve.rollout.guard import Guard
from dne_serve.rollout.memory import MemoryCheck
from dne_serve.rollout.metrics import Metrics
from dne_serve.rollout.promote import Moved, Mover, RecordMover
from dne_serve.rollout.reloader import GLANCES, Reloader
from dne_serve.rollout.residents import ImageBatcher, ImageTicket, ResidentLimits, Residents
from dne_serve.rollout.statistics import Statistics
from dne_serve.rules.collect import parse_collect_rules
from dne_serve.rules.guard import parse_rules
from dne_serve.settings import Settings, listed
from dne_serve.tracing.spans import CURRENT
from dne_serve.tracing.tracer import make_tracer
from dne_serve.trainer_child import TrainerChild, worker_command, worker_environment
from dne_serve.webhooks.announcer import Announcer
from dne_serve.webhooks.events import GUARD, NotLoaded
from dne_serve.webhooks.inbox_news import InboxNews
from dne_serve.webhooks.news import RECENT_S, ChannelNews
from model_store.cli.command import current_actor
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest
from model_store.spec import NetworkSpec

STORE_READS = 4
"""Requests that read the store at a time."""
STORE_MOVES = 2
"""Requests that move the channel, or load and unload, at a time."""
DRAINS = "this server is about to stop; ask another one"
WRITER_NICENESS = 15
MAX_WAITING = 64
"""Requests of either kind that wait; more are answered with 503."""


class Serving:
    """A running server without HTTP: engine, batcher, versions in memory and their watchers."""

    def __init__(self, settings: Settings, *, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.drains = False
        self.metrics = Metrics()
        self.metrics.built(backend=engine.backend, device=engine.device)
        self.metrics.queue_limit.set(settings.max_queue)
        self.statistics = Statistics(on_decoded=self._decoded)
        self.tracer = make_tracer(settings, on_outcome=self.metrics.traced)
        self.door = Door(
            TokenSource(settings), rate=settings.rate_limit, is_local=is_loopback(settings.host)
        )
        self.audit = Audit(settings.audit_log)
        self.open_store = SameStore(settings.store)
        self.desk = Desk(self.open_store)
        self._writer = self._new_writer()
        rules = parse_collect_rules(listed(settings.collect))
        self.collector = Collector(rules, writer=self._writer) if rules else None
        self._decoder = Decoder(
            threads=settings.fixed.decode_threads,
            seconds=settings.fixed.decode_seconds,
            max_pixels=settings.max_pixels,
            max_queue=settings.max_queue,
            max_images=settings.max_images,
        )
        self._trainer = self._new_trainer() if settings.with_trainer else None
        self.answers = AnswerBuilder()
        self.readers = StoreThreads("store", threads=STORE_READS, waiting=MAX_WAITING)
        self.movers = StoreThreads("move", threads=STORE_MOVES, waiting=MAX_WAITING)
        self.batcher = ImageBatcher(
            engine.run,
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            workers=engine.workers,
            on_batch=self.metrics.ran,
            on_ran=self._ran,
            join=joined,
        )
        self.trust = settings.read_trust()
        self._memory = MemoryCheck(lambda: self.residents.manifests, pass_bytes=self._pass_bytes)
        self.residents = Residents(
            engine,
            batcher=self.batcher,
            limits=ResidentLimits(
                spare=settings.max_resident,
                max_bytes=settings.max_model_bytes,
                idle_s=settings.fixed.idle_seconds,
            ),
            admit=self._admit,
        )
        self.mover = Mover(self.open_store, residents=self.residents, channel=settings.channel)
        self._guard = Guard(
            lambda: RecordMover(self.mover),
            rules=parse_rules(listed(settings.guard)),
            channel=settings.channel,
            actor=f"{GUARD}{current_actor()}",
            window_s=settings.guard_seconds,
            least=settings.fixed.guard_least,
            on_return=self._returned,
        )
        self.companions = Companions(
            settings.read_canary(),
            settings.shadow,
            residents=self.residents,
            compares_canary=self.collector is not None and self.collector.wants_disagreement,
        )
        self.reloader = Reloader(
            self.open_store,
            residents=self.residents,
            beside=self._looked,
            channel=settings.channel,
            poll_s=settings.poll_seconds,
            settle_s=settings.settle_seconds,
            on_swap=self._swapped,
            on_failed_load=self.metrics.failed_loads.inc,
            traces=self.tracer.swaps if self.tracer else None,
        )
        self.webhooks = Announcer(settings, on_outcome=self.metrics.posted)
        self._news = ChannelNews(
            self.open_store,
            head=lambda: self.reloader.head,
            failed=self._not_loaded,
            announce=self.webhooks.announce,
            tick_s=settings.poll_seconds,
            look_every_s=(GLANCES + 1) * settings.poll_seconds,
            inbox=self._inbox_news(),
        )
        self.predictor = Predictor(
            self.open_store,
            residents=self.residents,
            companions=self.companions,
            batcher=self.batcher,
            decoder=self._decoder,
            guard=self._guard,
            statistics=self.statistics,
            max_wait_s=settings.max_wait_seconds,
            wants_tokens=self.collector is not None,
            on_answered=self.metrics.answered,
            on_compared=self.metrics.compared,
            counts=self.metrics.answers,
        )
        self.metrics.watch(
            queue=lambda: self.batcher.depth,
            residents=lambda: self.residents.count,
            model_bytes=lambda: self.residents.bytes,
            following=lambda: self.residents.served is not None and self.error is None,
            fallback=lambda: self.reloader.fallback,
            channel_version=lambda: self.reloader.head.target if self.reloader.head else 0,
        )

    def start(self) -> None:
        self.batcher.start()
        if self.tracer is not None:
            self.tracer.start()
        self.reloader.start()
        if self.collector is not None:
            self._writer.start()
        if self._trainer is not None:
            self._trainer.start()
        if self.webhooks.is_heard:
            self.webhooks.start()
            self._news.start()

    def stop(self) -> None:
        """Stop the reloader first: a load under way still needs the engine."""
        self._guard.stop()
        if self._trainer is not None:
            self._trainer.stop()
        self._writer.stop()
        self.reloader.stop()
        self.readers.stop(wait=False)
        self.movers.stop(wait=True)
        self.predictor.stop()
        self._decoder.stop()
        self.batcher.stop()
        self.answers.stop()
        self.audit.close()
        if self.webhooks.is_heard:
            self._news.stop()
            self.webhooks.stop()
        if self.tracer is not None:
            self.tracer.stop()

    def drain(self) -> None:
        """Say that no new client should come. Requests are still answered."""
        self.drains = True

    @property
    def error(self) -> str | None:
        """Tell why the channel's head is not served, in a sentence that may leave this machine."""
        if self.reloader.withdrawn:
            return "the model was unloaded; loading it or moving the channel brings it back"
        failure = self.reloader.failure
        return tell(failure.error) if failure else None

    def _inbox_news(self) -> InboxNews | None:
        if self.settings.webhook_inbox is None:
            return None
        return InboxNews(
            lambda: self.desk.index,
            bound=self.settings.webhook_inbox,
            announce=self.webhooks.announce,
            recent_s=RECENT_S,
        )

    def _new_writer(self) -> Writer:
        """Make the writer of the inbox, whose process gives way to all others."""
        process = DecodeProcess(
            seconds=self.settings.fixed.decode_seconds,
            max_pixels=self.settings.max_pixels,
            niceness=WRITER_NICENESS,
        )
        caps = Caps(
            per_hour=self.settings.collect_per_hour,
            total=self.settings.collect_total,
            days=self.settings.collect_days,
        )
        return Writer(
            self.desk,
            process=process,
            channel=self.settings.channel,
            caps=caps,
            on_outcome=self.metrics.settled,
        )

    def _new_trainer(self) -> TrainerChild:
        command = worker_command(store=self.settings.store, channel=self.settings.channel)
        return TrainerChild(command, environment=worker_environment(os.environ))

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

    def _admit(self, manifest: Manifest) -> None:
        """Refuse a version before any byte of it is read."""
        if self.trust is not None:
            self.trust.check(manifest)
        self._memory.check(manifest)

    def _decoded(self, began_ns: int, ended_ns: int) -> None:
        """Count the decoding of a request for Prometheus and its trace."""
        self.metrics.decode_seconds.observe((ended_ns - began_ns) / 1e9)
        trace = CURRENT.get()
        if trace is not None:
            trace.decoded(began_ns, ended_ns)

    def _ran(self, tickets: Sequence[ImageTicket], began_ns: int, ended_ns: int) -> None:
        """Count a batch for the Open Inference Protocol, for Prometheus and for traces."""
        self.statistics.ran(tickets, began_ns, ended_ns)
        waits_ns = [began_ns - ticket.arrived_ns for ticket in tickets]
        self.metrics.computed(waits_ns=waits_ns, run_ns=ended_ns - began_ns)
        for ticket in tickets:
            if ticket.item.watch is not None:
                ticket.item.watch.ran(ticket.arrived_ns, began_ns, ended_ns)

    def _looked(self) -> None:
        """Note that the head is served, and load what is tried beside it."""
        if self.error is None and not self.reloader.fallback:
            self.metrics.followed.set_to_current_time()
        self.companions.load(self.open_store)

    def _swapped(self, version: int) -> None:
        self.metrics.swapped(version)
        # A fallback was not promoted just now, and its faults are not the head's.
        if self.reloader.record is not None and not self.reloader.fallback:
            self._guard.serving(self.reloader.record)

    def _returned(self, record: ChannelRecord, rule: str) -> None:
        self.metrics.guard_returns.inc()
        self.audit.note(f"guard {rule}", who=record.actor, to=record.target, reason=record.reason)
        self.reloader.poll()

    def _not_loaded(self) -> NotLoaded | None:
        """Describe a head that failed to load twice: a single fault of the network is no news."""
        failure, served = self.reloader.failure, self.residents.served
        if failure is None or failure.record is None or failure.times < 2:
            return None
        return NotLoaded(
            record=failure.record,
            error=tell(failure.error),
            serving=served.version if served else None,
        )

    def load(self) -> None:
        """Serve the version that the channel names, also after it was withdrawn."""
        try:
            self.reloader.follow()
        except Exception as error:
            raise NotServed(
                f"channel {self.settings.channel} cannot be followed: {tell(error)}"
            ) from error

    def withdraw(self) -> None:
        """Serve nothing until the model is loaded again or the channel is moved through us."""
        self.reloader.withdraw()
        self.metrics.served_version.set(0)

    def follow(self, moved: Moved) -> None:
        """Take up the version that a new record of the channel names."""
        record = moved.record
        try:
            self.reloader.follow(loaded=moved.resident)
        except Exception as error:
            raise NotServed(
                f"{record.channel} names version {record.target} now, "
                f"and this server cannot follow it: {tell(error)}"
            ) from error

    async def until_served(self, record: ChannelRecord) -> int:
        """Await the moment of a record that was taken up, and return the version that is served
        then. A newer record may have come meanwhile."""
        waiting = self.reloader.settling.until_served(record)
        if waiting is not None:
            await asyncio.shield(asyncio.wrap_future(waiting))
        served = self.residents.served
        return served.version if served else record.target
