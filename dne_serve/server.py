"""Put the parts of a model together, and start and stop them in the right order."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

from dne_serve.engines.base import Engine
from dne_serve.errors import NotServed, public_message
from dne_serve.inference.nearest import NearestKept
from dne_serve.inference.predictor import Predictor
from dne_serve.loop.collector import Collector
from dne_serve.loop.inbox_handle import InboxHandle
from dne_serve.loop.trainer_child import TrainerChild, worker_command, worker_environment
from dne_serve.loop.writer import InboxWriter
from dne_serve.observe.events import Events, note_answered
from dne_serve.observe.live import ActivityAnswer, Stream, snapshot
from dne_serve.observe.metrics import Statistics
from dne_serve.rollout.canary import CanaryAndShadow
from dne_serve.rollout.channel import ChannelMove, Mover, SameStore
from dne_serve.rollout.guard import CanaryWatch, Guard
from dne_serve.rollout.loaded_versions import ImageFlow, LoadedLimits, LoadedVersions
from dne_serve.rollout.reloader import NEXT_POLLS, Reloader
from dne_serve.setting_values import (
    CollectLimits,
    parse_canary,
    parse_collect,
    parse_guard,
    parse_webhook,
)
from dne_serve.settings import SECRETS, Settings, listed
from dne_serve.shared import Shared
from dne_serve.webhooks.events import GUARD, RECENT_S, ChannelNews, Event, InboxNews, NotLoaded
from model_store.cli.command import current_actor
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest

_BATCH_SHARE = 4
"""A model may fill a quarter of a batch while others are asked."""
DRAINS = "this server is about to stop; ask another one"


class Serving:
    """A model that is served, without HTTP: its store, its versions in memory and their watchers.
    The rest it shares with other models."""

    def __init__(
        self,
        settings: Settings,
        *,
        shared: Shared,
        name: str | None = None,
        rate: float | None = None,
    ) -> None:
        """`name` is the model's, where the server has many, and `rate` the requests with images
        that it takes in a second."""
        self.settings = settings
        self.shared = shared
        self.name = name
        self._rate = rate
        self.keys, self.metrics, self.tracer = shared.keys, shared.metrics, shared.tracer
        self.authorizer, self.audit = shared.authorizer, shared.audit
        self.batcher, self.answers, self.webhooks = shared.batcher, shared.answers, shared.webhooks
        self.readers, self.labellers = shared.readers, shared.labellers
        self.movers = shared.movers
        self.open_store = SameStore(settings.store, keys=self.keys)
        self.statistics = Statistics()
        self.counts = self.metrics.counts_of(settings.model_name)
        self.flow = ImageFlow(on_ran=self.statistics.ran)
        if name is not None:
            self.flow.most = settings.max_queue
            self.flow.burst = max(1, settings.max_batch // _BATCH_SHARE)
        self._open_inbox()
        self._hold_versions()
        self._follow_channel()
        self._announce()
        self._answer()
        self.stream = Stream(
            lambda: self.activity().model_dump(),
            ends=lambda: self.drains,
            listeners=shared.listeners,
        )

    @property
    def engine(self) -> Engine:
        """Return the engine that answers."""
        return self.shared.engine

    @property
    def measures(self) -> bool:
        """Return whether engines are being measured beside the server."""
        return self.shared.measures

    @property
    def drains(self) -> bool:
        return self.shared.drains

    def drain(self) -> None:
        """Say that no new client should come. Requests are still answered."""
        self.shared.drains = True

    def _open_inbox(self) -> None:
        """Create the writer of the inbox, and the worker beside the server."""
        self.inbox_handle = InboxHandle(self.open_store)
        collecting = parse_collect(listed(self.settings.collect))
        self.writer = self._new_writer(collecting.limits, sweeps=bool(collecting.rules))
        rules = collecting.rules
        self.collector = Collector(rules, writer=self.writer) if rules else None
        self.trainer = self._new_trainer() if self.settings.with_trainer else None

    def _hold_versions(self) -> None:
        """Create the versions in memory, with their limits."""
        settings = self.settings
        self.loaded = LoadedVersions(
            self.shared.room,
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
        self._canary_watch = CanaryWatch(
            self.mover,
            trial=self.canary_and_shadow,
            served=lambda: self.reloader.record,
            rules=guarding.rules,
            channel=settings.channel,
            actor=f"canary:{current_actor()}",
            least=settings.fixed.guard_least,
            on_promoted=self._canary_promoted,
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
            traces=self.tracer.swaps(self.name) if self.tracer else None,
            model=self.name,
        )

    def _announce(self) -> None:
        """Create what tells webhooks of this model."""
        self._news = ChannelNews(
            self.open_store,
            head=lambda: self.reloader.head,
            failed=self._not_loaded,
            announce=self._tell,
            tick_s=self.settings.poll_seconds,
            look_every_s=(NEXT_POLLS + 1) * self.settings.poll_seconds,
            inbox=self._inbox_news(),
        )

    def _answer(self) -> None:
        """Create the predictor. Every subscriber of its events is called for each of them."""
        answered = (
            self.statistics.answered,
            self.counts.answered,
            self._guard.answered,
            self._canary_watch.answered,
            note_answered,
        )
        self.predictor = Predictor(
            self.open_store,
            loaded=self.loaded,
            canary_and_shadow=self.canary_and_shadow,
            batcher=self.batcher,
            flow=self.flow,
            decoder=self.shared.decoder,
            events=Events(on_answered=answered, on_compared=(self.counts.compared,)),
            max_wait_s=self.settings.max_wait_seconds,
            wants_tokens=self.collector is not None,
            turns=self.shared.turns,
            rate=self._rate,
        )
        self.nearest = NearestKept(self.open_store, predictor=self.predictor, readers=self.readers)

    def start(self, *, polls: bool = True) -> None:
        """Start the threads of the model. Without `polls`, the channel is looked at by `look`."""
        self.reloader.start(polls=polls)
        if self.collector is not None:
            self.writer.start()
        if self.trainer is not None:
            self.trainer.start()
        if self.webhooks.is_heard and polls:
            self._news.start()

    def look(self) -> None:
        """Follow the channel once, and tell webhooks what is new."""
        self.reloader.look()
        if self.webhooks.is_heard:
            self._news.look()

    def stop(self) -> None:
        """Stop what loads: a load under way still needs the engine."""
        self._guard.stop()
        self._canary_watch.stop()
        if self.trainer is not None:
            self.trainer.stop()
        self.writer.stop()
        self.reloader.stop()

    def end(self) -> None:
        """Stop the rest, when no move is under way any more."""
        self.predictor.stop()
        self._news.stop()

    def _tell(self, event: Event) -> None:
        """Announce an event, which names the model where there are many."""
        if self.name is not None:
            event = replace(event, data={"model": self.name, **event.data})
        self.webhooks.announce(event)

    @property
    def is_following(self) -> bool:
        """Return whether what the channel names is what is served."""
        return self.loaded.served is not None and self.error is None

    @property
    def channel_version(self) -> int:
        """Return the version that the channel named when it was read last; 0 for none."""
        return self.reloader.head.target if self.reloader.head else 0

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
            self.counts,
            version=served.version if served else None,
            channel=self.settings.channel,
            queue=len(self.flow.tickets),
            queue_limit=self.settings.max_queue,
            canary=self.canary_and_shadow.ready("canary"),
            shadow=self.canary_and_shadow.ready("shadow"),
            canary_share=self.canary_and_shadow.share,
        )

    def _inbox_news(self) -> InboxNews | None:
        webhook = self.settings.webhook
        bound = parse_webhook(webhook).inbox if webhook is not None else None
        if bound is None:
            return None
        return InboxNews(
            lambda: self.inbox_handle.index,
            bound=bound,
            announce=self._tell,
            recent_s=RECENT_S,
        )

    def _new_writer(self, limits: CollectLimits, *, sweeps: bool) -> InboxWriter:
        """Make the writer of the inbox. Only a server that
        collects sweeps the inbox: its operator has said for how many days pictures stay."""
        return InboxWriter(
            self.inbox_handle,
            process=self.shared.reencoder,
            channel=self.settings.channel,
            limits=limits,
            sweeps=sweeps,
            on_outcome=self.metrics.settled,
        )

    def _new_trainer(self) -> TrainerChild:
        command = worker_command_of(self.settings)
        return TrainerChild(command, environment=worker_environment(os.environ, secrets=SECRETS))

    def _admit(self, manifest: Manifest) -> None:
        """Refuse a version before any byte of it is read."""
        if self.keys.trust is not None:
            self.open_store().keys.check_version(manifest)
        self.shared.admit(manifest, model=self.name)

    def _looked(self) -> None:
        """Note that the head is served, and load what is tried beside it."""
        if self.error is None and not self.reloader.fallback:
            self.metrics.followed.set_to_current_time()
        self.canary_and_shadow.load(self.open_store)

    def _swapped(self, version: int) -> None:
        self.counts.swapped(version)
        # A fallback was not promoted just now, and its faults are not the head's.
        if self.reloader.record is not None and not self.reloader.fallback:
            self._guard.serving(self.reloader.record)

    def _returned(self, record: ChannelRecord, rule: str) -> None:
        self.metrics.guard_returns.inc()
        model = {} if self.name is None else {"model": self.name}
        moved = {"who": record.actor, "to": record.target, "reason": record.reason}
        self.audit.note(f"guard {rule}", **model, **moved)
        self.reloader.poll()

    def _canary_promoted(self, record: ChannelRecord, reason: str) -> None:
        model = {} if self.name is None else {"model": self.name}
        moved = {"who": record.actor, "to": record.target, "reason": reason}
        self.audit.note("canary", **model, **moved)
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
        if self.name is None:
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
