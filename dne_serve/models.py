"""Find the models of a server by their names, load them when they are asked, and let them go.

With `--store` there is one model. With `--models` every store below a place is one, named by its
folder. All models share one engine: a model costs its classifier and its records. One thread looks
at the channels of the models in memory, in turn and within a budget.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from dne_serve.engines.base import Engine
from dne_serve.errors import ModelsUnread, NotOffered, StoreChanged, no_model, public_message
from dne_serve.inference.store_threads import Deadline, Loads
from dne_serve.observe.metrics import ServerMetrics
from dne_serve.rollout.engine_switch import Auto, Subject
from dne_serve.rollout.reloader import step_back
from dne_serve.server import Serving
from dne_serve.setting_values import ModelsPlace, parse_models
from dne_serve.settings import NO_MODEL, Settings
from dne_serve.shared import MAX_WAITING, Shared
from model_store.errors import DneError, StoreNotFound, WrongUsage
from model_store.layout import STORE

MODEL = "dne.model"
"""Key of an ASGI scope: the name of a model in the path of the request."""
SERVING = "dne.serving"
"""Key of an ASGI scope: the model that answers, once the request is permitted."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
POLLS_A_SECOND = {False: 200, True: 20}
"""Looks at channels in a second at most, of all models together: in a directory, in a bucket. A
look is one request of the bucket, and every thirty-first is three."""
LISTED_S = {False: 5.0, True: 60.0}
"""Age at which the list of names is read again, when somebody asks for it."""
_LOADS = 2
"""Models that are loaded at a time. The engine builds them one after the other."""
_IN_USE_S = 1.0
"""A model that was asked within this time does not give way to others."""
_QUEUE_SHARE = 4
"""A model may fill a quarter of the queue, unless its limits say otherwise."""

log = logging.getLogger("dne_serve.models")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits of one model. None leaves those of the server."""

    images: int | None = None
    """Images in a request."""
    waiting: int | None = None
    """Images that may wait for the engine."""
    rate: float | None = None
    """Requests with images in a second."""


LimitRows = list[tuple[str, Mapping[str, Any]]]
_LIMIT = re.compile(r"(images|waiting|rate)=([0-9]{1,7}(?:\.[0-9]{1,3})?)")


def parse_limits(text: str, *, source: str) -> LimitRows:
    """Parse lines such as `acme-* waiting=64 rate=20 images=16`."""
    rows: LimitRows = []
    for number, line in enumerate(text.splitlines(), start=1):
        pattern, *words = line.partition("#")[0].split() or [""]
        if not pattern:
            continue
        limits = [_LIMIT.fullmatch(word) for word in words]
        if not NAME.fullmatch(pattern.removesuffix("*") or "a") or not words or None in limits:
            raise WrongUsage(
                f"line {number} of {source}: limits are written as NAME waiting=N rate=N images=N, "
                "where NAME is a model, acme-* or *"
            )
        named = {limit[1]: limit[2] for limit in limits if limit}
        numbers = {name: float(n) if name == "rate" else int(float(n)) for name, n in named.items()}
        if 0 in numbers.values():
            raise WrongUsage(f"line {number} of {source}: a limit is more than 0")
        rows.append((pattern, numbers))
    return rows


def limits_of(rows: LimitRows, name: str) -> ModelLimits:
    """Take the limits of all lines that match a name. Later lines win."""
    found: dict[str, Any] = {}
    for pattern, limits in rows:
        if fnmatch.fnmatchcase(name, pattern):
            found |= limits
    return ModelLimits(**found)


class ModelFolders:
    """The folders below a place, each of which may be a store."""

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/") or "/"
        self.is_bucket = "://" in location
        self._names: list[str] = []
        self._read_at: float | None = None
        self._reading = threading.Lock()

    def store_of(self, name: str) -> str:
        """Return the location of the store that a name stands for."""
        return f"{self.location}/{name}"

    def names(self, *, fresh: bool = False) -> list[str]:
        """List the names in alphabetical order, from memory if they were read a short time ago.
        Raise ModelsUnread if they cannot be read. Blocks."""
        with self._reading:
            age_s = time.monotonic() - self._read_at if self._read_at is not None else None
            if fresh or age_s is None or age_s > LISTED_S[self.is_bucket]:
                try:
                    self._names = sorted(filter(NAME.fullmatch, self._read()))
                except (OSError, DneError) as error:
                    reason = error.strerror if isinstance(error, OSError) else str(error)
                    raise ModelsUnread(f"the models cannot be listed: {reason}") from error
                self._read_at = time.monotonic()
            return self._names

    def _read(self) -> Iterator[str]:
        if self.is_bucket:
            from model_store.backends.s3 import folders_below  # imports obstore

            yield from folders_below(self.location)
            return
        with os.scandir(self.location) as items:
            for item in items:
                if item.is_dir() and os.path.exists(f"{item.path}/{STORE}"):
                    yield item.name


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A model in memory."""

    serving: Serving
    used_s: float | None
    """When it was asked last, in seconds since 1970; None where nobody counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The facts of a model for the list of models. The facts of a cold model are those from the
    time when it was in memory."""

    name: str
    loaded: bool = False
    version: int | None = None
    classes: int | None = None
    used_s: float | None = None
    error: str | None = None
    minutes: tuple[int, ...] = ()


@dataclass(slots=True)
class _Known:
    """Models that left the memory, by name, and the owners of store ids."""

    states: dict[str, ModelState] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)


class Models:
    """The models of one server."""

    def __init__(self, settings: Settings, *, engine: Engine, auto: Auto | None = None) -> None:
        self.settings = settings
        place = parse_models(settings.models) if settings.models else None
        self.shared = Shared(
            settings, engine=engine, auto=auto, subject=self._subject, give_way=self._give_way
        )
        self.only: Serving | None = None
        """The model, where the server has one store."""
        self._known = _Known()
        self._loaded: OrderedDict[str, _Entry] = OrderedDict()
        """The models in memory, least recently asked first."""
        self._table = threading.Lock()
        self._gone: list[Serving] = []
        self._stopping = threading.Event()
        self.default: str | None = None
        """The model that the short routes ask."""
        if place is None:
            self.only, self.default = Serving(settings, shared=self.shared), settings.model_name
        else:
            self._open_place(place)
        self._watch_gauges(self.shared.metrics)

    def _open_place(self, place: ModelsPlace) -> None:
        self.folders = ModelFolders(place.location)
        self._limits: LimitRows = []
        if place.limits is not None:
            try:
                text = place.limits.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise WrongUsage(f"the file of limits {place.limits} cannot be read") from error
            self._limits = parse_limits(text, source=str(place.limits))
        named = self.settings.model_name
        self.default = None if named == NO_MODEL else named
        self._loads = Loads(self._open, threads=_LOADS, most=MAX_WAITING, what="models")
        self._watching = threading.Thread(target=self._watch, name="models", daemon=True)
        self._unlisted: str | None = "the models were not listed yet"

    @property
    def are_many(self) -> bool:
        """Return whether models have names."""
        return self.only is None

    @property
    def error(self) -> str | None:
        """Explain why the server is not ready; None if it is."""
        if self.only is not None:
            missing = f"channel {self.settings.channel} names no version yet"
            return None if self.only.loaded.served else self.only.error or missing
        return self._unlisted

    @property
    def loaded(self) -> list[Serving]:
        """List the models in memory."""
        if self.only is not None:
            return [self.only]
        with self._table:
            return [entry.serving for entry in self._loaded.values()]

    @property
    def is_held(self) -> bool:
        return self.shared.is_held

    def name_in(self, scope: Scope) -> str | None:
        """Return the name of the model that a request is for; None where models have no names, or
        the request names none and there is no default."""
        if self.only is not None:
            return None
        name: str | None = scope.get(MODEL)
        return name or self.default

    async def get(self, name: str | None) -> Serving:
        """Return a model, and load it if it is cold. Raise NotOffered if there is none of that
        name. Ask only for requests that are permitted."""
        if self.only is not None:
            return self.only
        if name is None:
            raise NotOffered("this server has many models: ask /models/NAME/…, or GET /models")
        with self._table:
            entry = self._loaded.get(name)
            if entry is not None:
                entry.used_s = time.time()
                self._loaded.move_to_end(name)
                return entry.serving
        return await self._loads.get(name, deadline=Deadline(self.settings.max_wait_seconds))

    def start(self) -> None:
        self.shared.start()
        if self.only is not None:
            self.only.start()
        else:
            self._watching.start()
        self.shared.measure()

    def stop(self) -> None:
        """Stop what loads first: a load under way still needs the engine."""
        self._stopping.set()
        self.shared.stop_measuring()
        if self.are_many:
            self._watching.join()
            self._loads.stop()
        serving = [*self.loaded, *self._gone]
        for one in serving:
            one.stop()
        self.shared.stop_threads()
        for one in serving:
            one.end()
        self.shared.stop()

    def drain(self) -> None:
        """Say that no new client should come. Requests are still answered."""
        self.shared.drains = True

    # The list

    def names(self) -> list[str]:
        """List the names of all models in alphabetical order. Blocks."""
        return [self.settings.model_name] if self.only is not None else self.folders.names()

    def states(self, names: list[str]) -> list[ModelState]:
        """Tell the facts of models, without loading any."""
        if self.only is not None:
            return [_state(name, _Entry(serving=self.only, used_s=None)) for name in names]
        with self._table:
            entries = {name: self._loaded[name] for name in names if name in self._loaded}
        return [
            _state(name, entries[name])
            if name in entries
            else self._known.states.get(name, ModelState(name=name))
            for name in names
        ]

    # Loading

    def _open(self, name: str) -> Serving:
        """Load a model. Its version may be missing or broken: its own requests are told."""
        if not NAME.fullmatch(name):
            raise no_model(name)
        serving = self._made(name)
        try:
            store = serving.open_store()
        except (StoreNotFound, WrongUsage) as error:  # a file, or a location with strange signs
            raise no_model(name) from error
        self._claim(name, store.id)
        serving.start(polls=False)
        serving.reloader.look()
        with self._table:
            entry = self._loaded.setdefault(name, _Entry(serving=serving, used_s=time.time()))
            self._known.states.pop(name, None)
            too_many = len(self._loaded) > self.settings.fixed.max_models
        if too_many:
            with self.shared.room.loading:
                self._give_way(name)
        if entry.serving is not serving:  # the default was asked while it was loaded at the start
            self._gone.append(serving)
        log.info("model %s is in memory", name)
        return entry.serving

    def _made(self, name: str) -> Serving:
        limits = limits_of(self._limits, name)
        most = max(self.settings.max_images, self.settings.max_queue // _QUEUE_SHARE)
        changes = {
            "store": self.folders.store_of(name),
            "models": None,
            "model_name": name,
            "max_images": min(limits.images or self.settings.max_images, self.settings.max_images),
            "max_queue": min(limits.waiting or most, self.settings.max_queue),
        }
        settings = self.settings.model_copy(update=changes)
        return Serving(settings, shared=self.shared, name=name, rate=limits.rate)

    def _claim(self, name: str, store_id: str) -> None:
        """Refuse a store with the id of another one that is still there: it is a copy by other
        means than `dne-store copy`, and its records could be taken for those of the other."""
        owner = self._known.owners.setdefault(store_id, name)
        if owner == name:
            return
        try:
            is_there = self._made(owner).open_store().id == store_id
        except DneError:
            is_there = False
        if is_there:
            raise NotOffered(
                f"model {name} cannot be served: its store has the id of model {owner}; make the "
                "copy with `dne-store copy`"
            )
        self._known.owners[store_id] = name

    # Leaving

    def _give_way(self, to: str | None) -> bool:
        """Let go of the model that was not asked for longest. Call while nothing is loaded."""
        before = time.time() - _IN_USE_S
        with self._table:
            name = next((name for name in self._loaded if name not in (to, self.default)), None)
            if name is None or (self._loaded[name].used_s or 0) > before:
                return False
            entry = self._loaded.pop(name)
        self._forget(name, entry)
        log.info("model %s left the memory", name)
        return True

    def _forget(self, name: str, entry: _Entry) -> None:
        serving = entry.serving
        state = _state(name, entry)
        self._known.states[name] = ModelState(
            name=name, version=state.version, classes=state.classes, used_s=state.used_s
        )
        self.shared.room.leave(serving.loaded)
        serving.loaded.drop()
        self._gone.append(serving)  # another thread stops it: it may wait for this one

    # Following

    def _watch(self) -> None:
        """List the models, load the default, and look at the channels in turn."""
        step_back()
        while not self._stopping.is_set():
            self._list()
            rate = POLLS_A_SECOND[self.folders.is_bucket]
            entries = self._entries()
            for name, entry in entries:
                self._look(name, entry)
                pause_s = max(self.settings.poll_seconds / len(entries), 1 / rate)
                if self._stopping.wait(pause_s):
                    return
            if not entries:
                self._stopping.wait(self.settings.poll_seconds)

    def _entries(self) -> list[tuple[str, _Entry]]:
        with self._table:
            return list(self._loaded.items())

    def _list(self) -> None:
        """Become ready: the models can be listed, and the default answers."""
        while self._gone:
            gone = self._gone.pop()
            gone.stop()
            gone.end()
        if self._unlisted is None:
            return
        try:
            self.folders.names(fresh=True)
            if self.default is not None and self.default not in dict(self._entries()):
                self._open(self.default)
        except Exception as error:  # it is tried again, and the loop must not end
            reason = public_message(error)
            if reason != self._unlisted:
                log.warning("%s", error)
            self._unlisted = reason
            self._stopping.wait(1.0)
        else:
            self._unlisted = None

    def _look(self, name: str, entry: _Entry) -> None:
        serving = entry.serving
        try:
            serving.look()
            failure = serving.reloader.failure
            if failure is not None and isinstance(failure.error, StoreChanged):
                self._let_go_if_gone(name, entry)
        except Exception as error:  # the other models are looked at all the same
            log.error("model %s could not be looked at: %s", name, error, exc_info=error)

    def _let_go_if_gone(self, name: str, entry: _Entry) -> None:
        """Let go of a model whose store has vanished or was replaced, unless all stores have: a
        place that is not mounted looks like one without stores."""
        if set(self.folders.names(fresh=True)) <= {name} or name == self.default:
            return
        with self.shared.room.loading:
            with self._table:
                self._loaded.pop(name, None)
            self._forget(name, entry)
        self._known.states.pop(name, None)
        log.warning("model %s left: its store has vanished or was replaced", name)

    def _subject(self) -> Subject | None:
        """Name the version by which engines are measured: that of the model loaded first."""
        for serving in self.loaded:
            served = serving.loaded.served
            if served is not None:
                return Subject(manifest=served.manifest, location=serving.settings.store)
        return None

    def _watch_gauges(self, metrics: ServerMetrics) -> None:
        """Set the gauges that a scrape reads."""
        metrics.watch(
            queue_images=lambda: self.shared.batcher.depth,
            residents=lambda: sum(one.loaded.count for one in self.loaded),
            model_bytes=lambda: self.shared.room.bytes,
            following=lambda: all(one.is_following for one in self.loaded),
            fallback=lambda: any(one.reloader.fallback for one in self.loaded),
            channel_version=lambda: self.only.channel_version if self.only else 0,
        )
        if self.are_many:
            metrics.watch(models_loaded=lambda: len(self._loaded))


def _state(name: str, entry: _Entry) -> ModelState:
    serving = entry.serving
    served = serving.loaded.served
    return ModelState(
        name=name,
        loaded=True,
        version=served.version if served else None,
        classes=len(served.labels) if served else None,
        used_s=entry.used_s,
        error=serving.error or (None if served else "its channel names no version yet"),
        minutes=serving.counts.minutes.counts(),
    )
