"""Put the parts of a server together, and start and stop them in the right order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from dne_serve.access.audit import Audit
from dne_serve.access.auth import Authorizer, is_for_this_machine
from dne_serve.access.permission import TokenSource
from dne_serve.engines.base import Engine, joined
from dne_serve.errors import NotServed, public_message
from dne_serve.inference.answers import AnswerBuilder
from dne_serve.inference.decode_process import DecodeProcess
from dne_serve.inference.decoding import Decoder
from dne_serve.inference.nearest import NearestKept
from dne_serve.inference.predictor import Predictor
from dne_serve.inference.store_threads import StoreThreads
from dne_serve.loop.collector import Collector
from dne_serve.loop.inbox_handle import InboxHandle
from dne_serve.loop.trainer_child import TrainerChild, worker_command, worker_environment
from dne_serve.loop.writer import InboxWriter
from dne_serve.observe.events import Events
from dne_serve.observe.live import ActivityAnswer, snapshot
from dne_serve.observe.metrics import ServerMetrics, Statistics
from dne_serve.observe.traces import note_answered
from dne_serve.observe.tracing import make_tracer
from dne_serve.rollout.canary import CanaryAndShadow
from dne_serve.rollout.channel import ChannelMove, Mover, SameStore
from dne_serve.rollout.engine_switch import Auto, EngineSwitch
from dne_serve.rollout.guard import Guard
from dne_serve.rollout.loaded_versions import (
    ImageBatcher,
    ImageTicket,
    LoadedLimits,
    LoadedVersions,
)
from dne_serve.rollout.memory import MemoryCheck, pass_bytes
from dne_serve.rollout.reloader import NEXT_POLLS, Reloader
from dne_serve.setting_values import (
    CollectLimits,
    parse_canary,
    parse_collect,
    parse_guard,
    parse_webhook,
)
from dne_serve.settings import SECRETS, Settings, listed
from dne_serve.webhooks.events import GUARD, RECENT_S, ChannelNews, InboxNews, NotLoaded
from dne_serve.webhooks.outbox import Announcer
from model_store.cli.command import current_actor
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest
from model_store.spec import NetworkSpec

STORE_READS = 4
"""Requests that read the store at a time."""
_STORE_LABELS = 2
"""Requests that write or delete labels at a time."""
_STORE_MOVES = 2
"""Requests that move the channel, or load and unload, at a time."""
DRAINS = "this server is about to stop; ask another one"
_WRITER_NICENESS = 15
MAX_WAITING = 64
"""Requests of each kind that wait; more are answered with 503."""


class Serving:
    """A running server without HTTP: engine, batcher, versions in memory and their watchers."""

    def __init__(self, settings: Settings, *, engine: Engine, auto: Auto | None = None) -> None:
        self.settings = settings
        self._first_engine = engine
        self.drains = False
        self.keys = settings.read_keys()
        self.open_store = SameStore(settings.store, keys=self.keys)
        self._observe()
        self._control_access()
        self._open_inbox()
        self._make_pools()
        self._hold_versions()
        self._follow_channel()
        self._announce()
        self._answer()
        self._switch_engines(auto)
        self._tell_engine()

    @property
    def engine(self) -> Engine:
        """Return the engine that answers."""
        return self.loaded.engine

    @property
    def measures(self) -> bool:
        """Return whether engines are being measured beside the server."""
        return self._engines is not None and self._engines.is_measuring

    def _observe(self) -> None:
        """Create the metrics, the statistics and the tracer."""
        self.metrics = ServerMetrics()
        self.metrics.queue_limit.set(self.settings.max_queue)
        self.statistics = Statistics()
        self.tracer = make_tracer(self.settings, on_outcome=self.metrics.traced)

    def _control_access(self) -> None:
        """Create the authorizer and the audit log."""
        settings = self.settings
        self.authorizer = Authorizer(
            TokenSource(settings), rate=settings.rate_limit, is_local=is_for_this_machine(settings)
        )
        self.audit = Audit(settings.audit_log)

    def _open_inbox(self) -> None:
        """Create the writer of the inbox, and the worker beside the server."""
        self.inbox_handle = InboxHandle(self.open_store)
        collecting = parse_collect(listed(self.settings.collect))
        self.writer = self._new_writer(collecting.limits, sweeps=bool(collecting.rules))
        rules = collecting.rules
        self.collector = Collector(rules, writer=self.writer) if rules else None
        self.trainer = self._new_trainer() if self.settings.with_trainer else None

    def _make_pools(self) -> None:
        """Make the threads and processes that keep long work off the event loop."""
        settings, fixed = self.settings, self.settings.fixed
        self._decoder = Decoder(
            threads=fixed.decode_threads,
            seconds=fixed.decode_seconds,
            max_pixels=settings.max_pixels,
            max_queue=settings.max_queue,
            max_images=settings.max_images,
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
        self.batcher = ImageBatcher(
            lambda widest, queries: self.engine.run(widest, queries),
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            workers=self._first_engine.workers,
            on_batch=self.metrics.ran,
            on_ran=self._ran,
            join=joined,
        )

    def _hold_versions(self) -> None:
        """Create the versions in memory, with their limits."""
        settings = self.settings
        self._memory = MemoryCheck(lambda: self.loaded.manifests, pass_bytes=self._pass_bytes)
        self.loaded = LoadedVersions(
            self._first_engine,
            batcher=self.batcher,
            limits=LoadedLimits(
                spare=settings.fixed.max_resident,
                max_bytes=settings.max_model_bytes,
                idle_s=settings.fixed.idle_seconds,
            ),
            admit=self._admit,
        )
        tried = parse_canary(listed(settings.canary))
        self.canary_and_shadow = CanaryAndShadow(
            tried.canary,
            tried.shadow,
            loaded=self.loaded,
            compares_canary=self.collector is not None and self.collector.wants_disagreement,
        )

    def _follow_channel(self) -> None:
        """Create the reloader, which follows the channel, and the mover."""
        settings = self.settings
        self.mover = Mover(self.open_store, loaded=self.loaded, channel=settings.channel)
        guarding = parse_guard(listed(settings.guard))
        self._guard = Guard(
            self.mover,
            rules=guarding.rules,
            channel=settings.channel,
            actor=f"{GUARD}{current_actor()}",
            window_s=guarding.seconds,
            least=settings.fixed.guard_least,
            on_return=self._returned,
        )
        self.reloader = Reloader(
            self.open_store,
            loaded=self.loaded,
            beside=self._looked,
            channel=settings.channel,
            poll_s=settings.poll_seconds,
            settle_s=settings.settle_seconds,
            on_swap=self._swapped,
            on_failed_load=self.metrics.failed_loads.inc,
            traces=self.tracer.swaps if self.tracer else None,
        )

    def _announce(self) -> None:
        """Create the webhooks, and the gauges that a scrape reads."""
        self.webhooks = Announcer(self.settings, on_outcome=self.metrics.posted)
        self._news = ChannelNews(
            self.open_store,
            head=lambda: self.reloader.head,
            failed=self._not_loaded,
            announce=self.webhooks.announce,
            tick_s=self.settings.poll_seconds,
            look_every_s=(NEXT_POLLS + 1) * self.settings.poll_seconds,
            inbox=self._inbox_news(),
        )
        self.metrics.watch(
            queue_images=lambda: self.batcher.depth,
            residents=lambda: self.loaded.count,
            model_bytes=lambda: self.loaded.bytes,
            following=lambda: self.loaded.served is not None and self.error is None,
            fallback=lambda: self.reloader.fallback,
            channel_version=lambda: self.reloader.head.target if self.reloader.head else 0,
        )

    def _answer(self) -> None:
        """Create the predictor. Every subscriber of its events is called for each of them."""
        answered = (
            self.statistics.answered,
            self.metrics.answered,
            self.metrics.answers.answered,
            self._guard.answered,
            note_answered,
        )
        self.predictor = Predictor(
            self.open_store,
            loaded=self.loaded,
            canary_and_shadow=self.canary_and_shadow,
            batcher=self.batcher,
            decoder=self._decoder,
            events=Events(on_answered=answered, on_compared=(self.metrics.compared,)),
            max_wait_s=self.settings.max_wait_seconds,
            wants_tokens=self.collector is not None,
        )
        self.nearest = NearestKept(self.open_store, predictor=self.predictor, readers=self.readers)

    def _switch_engines(self, auto: Auto | None) -> None:
        """Create the engine switch, if the choice is left to the server."""
        self._engines = None
        if auto is not None:
            self._engines = EngineSwitch(
                auto,
                location=self.settings.store,
                loaded=self.loaded,
                open_store=self.open_store,
                on_switch=self._tell_engine,
            )

    def _tell_engine(self) -> None:
        engine = self.engine
        self.metrics.built(
            backend=engine.backend,
            device=engine.device,
            engine=engine.choice.partition(":")[0],
        )

    def start(self) -> None:
        self.batcher.start()
        if self.tracer is not None:
            self.tracer.start()
        self.reloader.start()
        if self._engines is not None:
            self._engines.start()
        if self.collector is not None:
            self.writer.start()
        if self.trainer is not None:
            self.trainer.start()
        if self.webhooks.is_heard:
            self.webhooks.start()
            self._news.start()

    def stop(self) -> None:
        """Stop what loads first: a load under way still needs the engine."""
        self._guard.stop()
        if self._engines is not None:
            self._engines.stop()
        if self.trainer is not None:
            self.trainer.stop()
        self.writer.stop()
        self.reloader.stop()
        self.readers.stop(wait=False)
        self.labellers.stop(wait=False)
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
    def is_held(self) -> bool:
        """Return whether the store has not answered requests that were under way at the stop."""
        return self.readers.is_busy or self.labellers.is_busy

    @property
    def error(self) -> str | None:
        """Explain in a sentence why the head is not served. The sentence may leave this machine."""
        if self.reloader.withdrawn:
            return "the model was unloaded; loading it or moving the channel brings it back"
        failure = self.reloader.failure
        return public_message(failure.error) if failure else None

    def activity(self) -> ActivityAnswer:
        """Sum up what the server does now."""
        served = self.loaded.served
        return snapshot(
            self.metrics,
            version=served.version if served else None,
            channel=self.settings.channel,
            queue=self.batcher.depth,
            queue_limit=self.settings.max_queue,
            canary=self.canary_and_shadow.ready("canary"),
            shadow=self.canary_and_shadow.ready("shadow"),
        )

    def _inbox_news(self) -> InboxNews | None:
        webhook = self.settings.webhook
        bound = parse_webhook(webhook).inbox if webhook is not None else None
        if bound is None:
            return None
        return InboxNews(
            lambda: self.inbox_handle.index,
            bound=bound,
            announce=self.webhooks.announce,
            recent_s=RECENT_S,
        )

    def _new_writer(self, limits: CollectLimits, *, sweeps: bool) -> InboxWriter:
        """Make the writer of the inbox, whose process gives way to all others. Only a server that
        collects sweeps the inbox: its operator has said for how many days pictures stay."""
        process = DecodeProcess(
            seconds=self.settings.fixed.decode_seconds,
            max_pixels=self.settings.max_pixels,
            niceness=_WRITER_NICENESS,
        )
        return InboxWriter(
            self.inbox_handle,
            process=process,
            channel=self.settings.channel,
            limits=limits,
            sweeps=sweeps,
            on_outcome=self.metrics.settled,
        )

    def _new_trainer(self) -> TrainerChild:
        command = worker_command_of(self.settings)
        return TrainerChild(command, environment=worker_environment(os.environ, secrets=SECRETS))

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
        if self.keys.trust is not None:
            self.open_store().keys.check_version(manifest)
        self._memory.check(manifest)

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
        self.canary_and_shadow.load(self.open_store)

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
        """Describe a head that failed to load twice: a single network fault is not news."""
        failure, served = self.reloader.failure, self.loaded.served
        if failure is None or failure.record is None or failure.times < 2:
            return None
        return NotLoaded(
            record=failure.record,
            error=public_message(failure.error),
            serving=served.version if served else None,
        )

    def load(self) -> None:
        """Serve the version that the channel names, also after it was withdrawn."""
        try:
            self.reloader.follow()
        except Exception as error:
            raise NotServed(
                f"channel {self.settings.channel} cannot be followed: {public_message(error)}"
            ) from error

    def withdraw(self) -> None:
        """Serve nothing until the model is loaded again or the channel is moved through us."""
        self.reloader.withdraw()
        self.metrics.served_version.set(0)

    def follow(self, moved: ChannelMove) -> None:
        """Take up the version that a new record of the channel names."""
        record = moved.record
        try:
            self.reloader.follow(in_memory=moved.resident)
        except Exception as error:
            raise NotServed(
                f"{record.channel} names version {record.target} now, "
                f"and this server cannot follow it: {public_message(error)}"
            ) from error

    async def until_served(self, record: ChannelRecord) -> int:
        """Await the moment of a record that was taken up, and return the version that is served
        then. A newer record may have come meanwhile."""
        waiting = self.reloader.cutover.until_served(record)
        if waiting is not None:
            await asyncio.shield(asyncio.wrap_future(waiting))
        served = self.loaded.served
        return served.version if served else record.target


def worker_command_of(settings: Settings) -> list[str]:
    """Make the command of the worker, which signs where the server requires signatures."""
    command = worker_command(store=settings.store, channel=settings.channel)
    if settings.require_signatures:
        command += [f"--sign={settings.sign_key}", f"--trust={settings.trust}"]
    return command
