"""Make the engine that serves from the start, and measure engines on request."""

from __future__ import annotations

from contextlib import suppress

from dne_serve.engines.base import Engine
from dne_serve.engines.candidates import Measurement, cells, loads_of, remembered
from dne_serve.engines.choose import (
    Measuring,
    Wanted,
    candidates_for,
    choose_engine,
    make_candidate,
    request_for,
)
from dne_serve.errors import NotEnoughMemory
from dne_serve.rollout.engine_switch import EARLIER, Auto, fits
from dne_serve.rollout.memory import available_bytes
from dne_serve.settings import Settings
from model_store.cli.command import EXIT_OK, print_json
from model_store.errors import DneError, StoreNotFound, WrongUsage
from model_store.precision import Asked
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from model_store.tables import columns


def start_engine(settings: Settings) -> tuple[Engine, Auto | None]:
    """Make the engine that the settings name. If the choice is left to the server, make the one
    that an earlier measurement has found, or else a safe one, and tell what may take its place."""
    store = None
    if settings.models is None:
        with suppress(StoreNotFound):  # one that is absent may come; any other fault stays
            store = Store.open(settings.store, keys=settings.read_keys())
    if settings.backend != "auto":
        return _named(settings.backend, settings), None
    if _has_gpu(settings.device):
        return _named("torch", settings, choice="torch: there is a GPU"), None
    wanted, served = _wanted_by(settings), served_by(store, channel=settings.channel)
    candidates = candidates_for(wanted, served)
    kept = remembered(request_for(wanted, served)) if served is not None else None
    if kept is not None:
        engine = make_candidate(
            kept, threads=settings.threads, max_batch=settings.max_batch, choice=EARLIER
        )
        return engine, Auto(wanted=wanted, candidate=kept)
    if not candidates:
        return _named("torch", settings), None
    safe = candidates[0]
    choice = f"{safe.name}: safe until engines are measured"
    engine = _named(safe.backend, settings, precision=safe.precision, choice=choice)
    return engine, Auto(wanted=wanted, candidate=safe)


def _named(
    backend: str, settings: Settings, *, precision: Asked | None = None, choice: str = ""
) -> Engine:
    return choose_engine(
        backend,
        device=settings.device,
        threads=settings.threads,
        max_batch=settings.max_batch,
        precision=precision or settings.precision,
        choice=choice,
    )


def _wanted_by(settings: Settings) -> Wanted:
    limits = [one for one in (available_bytes(), settings.max_model_bytes) if one is not None]
    return Wanted(
        threads=settings.threads,
        max_batch=settings.max_batch,
        precision=settings.precision,
        resident=1 + settings.fixed.max_resident,
        room_bytes=min(limits, default=None),
    )


def served_by(store: Store | None, *, channel: str) -> Manifest | None:
    """Read the version that the channel names, if it can be read: serving it reports the fault."""
    if store is None:
        return None
    try:
        record = store.head(channel)
        return None if record is None else store.resolve(record)
    except DneError:
        return None


def _has_gpu(device: str) -> bool:
    if device == "cpu":
        return False
    from model_store.network.device import choose_device  # here, because torch takes seconds

    return choose_device(device).type != "cpu"


def measure_now(settings: Settings, *, as_json: bool) -> int:
    """Measure the engines for the version that the channel names, and print the figures."""
    if settings.models is not None:
        raise WrongUsage("--measure is for one store: name that of a model with --store")
    store = Store.open(settings.store, keys=settings.read_keys())
    record = store.head(settings.channel)
    if record is None:
        raise WrongUsage(f"channel {settings.channel} names no version: there is none to measure")
    served = store.resolve(record)
    request = request_for(_wanted_by(settings), served)
    if not fits(served, max_batch=settings.max_batch):
        raise NotEnoughMemory("there is too little free memory to measure; stop other programs")
    measured = Measuring(
        Measurement(
            store=settings.store, version=served.version, digest=served.digest, request=request
        )
    ).run()
    if not measured.figures:
        raise DneError(f"engines were not measured: {measured.fault}")
    best = measured.best(request)
    if as_json:
        told = {"figures": measured.figures, "engine": best.name, "remembered": measured.quiet}
        print_json({"version": served.version, **told, "excluded": list(measured.excluded)})
        return EXIT_OK
    loads = loads_of(measured.figures)
    rows = [
        [name, *cells(rates, loads), "*" if name == best.name else ""]
        for name, rates in measured.figures.items()
    ]
    print(columns([["images/s with so many under way", *loads, ""], *rows]))
    kept = (
        "servers on this machine take it from their next start"
        if measured.quiet
        else "not remembered, as other programs kept the processor busy: measure again"
    )
    print(f"{best.name} is the fastest for version {served.version}; {kept}")
    return EXIT_OK
