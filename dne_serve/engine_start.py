"""Make the engine that the settings ask for, or measure which one is fastest."""

from __future__ import annotations

from contextlib import suppress

from dne_serve.engines.base import Engine
from dne_serve.engines.choose import Choosing, Wanted, begin_choosing, choose_engine, served_by
from dne_serve.rollout.memory import available_bytes, pass_bytes
from dne_serve.settings import Settings
from model_store.errors import StoreNotFound
from model_store.records.manifest import Manifest
from model_store.store.store import Store

COPIES = 6
"""Copies of the weights that all measured engines hold together."""


def begin_measuring(settings: Settings) -> Choosing | None:
    """Begin to measure engines, if the choice is left to the server."""
    store = None
    with suppress(StoreNotFound):  # one that is absent may come; any other fault stays
        store = Store.open(settings.store, keys=settings.read_keys())
    if settings.backend != "auto":
        return None
    limits = [one for one in (available_bytes(), settings.max_model_bytes) if one is not None]
    wanted = Wanted(
        device=settings.device,
        threads=settings.threads,
        max_batch=settings.max_batch,
        precision=settings.precision,
        resident=1 + settings.fixed.max_resident,
        room_bytes=min(limits, default=None),
    )
    served = served_by(store, channel=settings.channel)
    return begin_choosing(wanted, served=served if _fits(served, settings) else None)


def make_engine(settings: Settings, choosing: Choosing | None) -> Engine:
    """Wait for the measurement that has begun, or take the engine that the settings name."""
    if choosing is not None:
        return choosing.engine()
    return choose_engine(
        settings.backend,
        device=settings.device,
        threads=settings.threads,
        max_batch=settings.max_batch,
        precision=settings.precision,
    )


def _fits(served: Manifest | None, settings: Settings) -> bool:
    """Return whether a pass of the version fits in memory: a hostile shape takes gigabytes."""
    if served is None:
        return False
    needed = pass_bytes(served.spec, batch=settings.max_batch, backend="onnx", workers=2)
    available = available_bytes()
    return available is None or needed + COPIES * 4 * served.spec.parameters < available
