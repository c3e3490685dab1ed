"""Serve with Ray: replicas of the same application behind the proxy of Ray Serve.

    serve run dne_serve.ray_app:app store=$PWD/models allow_open=true

Each replica has its own engine and follows the channel itself. The proxy listens, so the limits of
`dne_serve.wire` do not hold: docs/ray.md tells what takes their place. Ray is imported by `app`
alone, so that a replica can be made, and tested, without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from dne_serve.access.auth import check_exposure
from dne_serve.access.permission import read_tokens
from dne_serve.app import create_app
from dne_serve.engine_start import start_engine
from dne_serve.log_lines import set_up_log
from dne_serve.models import Models
from dne_serve.settings import SECRETS, Settings, load_settings
from model_store.errors import DneError, WrongUsage

NAME = "dne"
"""The name of the deployment, for `deployments:` in a file of Ray Serve."""
START = "start_seconds"
"""The argument that is not a setting: how long a replica waits for its first version."""
START_S = 60.0
LOOK_S = 0.05
"""Time between two looks for the first version."""
OF_THE_PROXY = frozenset({"host", "port", "tls_cert", "tls_key", "grace_seconds", "drain_seconds"})
"""Settings of the server's own listener."""
ANY_HOST = ""
"""A replica does not know who reaches the proxy, so it takes the whole network for granted."""
OPTIONS: Mapping[str, Any] = {
    "max_ongoing_requests": 64,
    "max_queued_requests": 256,
    "autoscaling_config": {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 8},
    "health_check_period_s": 5,
    "health_check_timeout_s": 30,
    "graceful_shutdown_wait_loop_s": 1,
    "graceful_shutdown_timeout_s": 20,
}
"""The deployment's options where its file names none."""

log = logging.getLogger("dne_serve")


class NoModel(DneError):
    """A replica that found no version to serve in its time."""


def app(arguments: dict[str, Any]) -> Any:
    """Build the application for `serve run` and `serve deploy`. Arguments are named as settings
    are, with `start_seconds` besides."""
    try:
        import ray.serve as serve
    except ImportError as error:
        raise WrongUsage("Ray is not installed: pip install 'dne-serve[ray]'") from error
    start_s = _start_seconds(arguments.get(START, START_S))
    given = {name: value for name, value in arguments.items() if name != START}
    read_settings(given)  # a wrong argument is told here, not by each replica
    ingress = serve.ingress()(Replica)
    return serve.deployment(ingress, name=NAME, **OPTIONS).bind(given, start_s)


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Read settings from arguments and the environment. WrongUsage for those that cannot hold."""
    unknown = sorted(given.keys() - Settings.model_fields.keys())
    if unknown:
        raise WrongUsage(f"unknown setting {unknown[0]}: docs/configuration.md lists all of them")
    for name in sorted(given.keys() & SECRETS):
        raise WrongUsage(f"{name} would be shown by Ray: give DNE_{name.upper()} to its nodes")
    settings = load_settings(**{**given, "host": ANY_HOST})
    # A certificate in the environment is refused too: its owner believes in encryption.
    if idle := (given.keys() & OF_THE_PROXY) | (settings.model_fields_set & {"tls_cert"}):
        raise WrongUsage(
            f"{min(idle)} has no effect here, because Ray's proxy listens: "
            "see http_options of Ray Serve and docs/ray.md"
        )
    return settings


def _start_seconds(given: Any) -> float:
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds <= 3600:
        raise WrongUsage(f"{START} must be more than 0 and at most 3600, not {given!r}")
    return seconds


class Replica:
    """One replica: application, engine and reloader. Ray calls its methods by their names."""

    def __init__(self, given: Mapping[str, Any], start_s: float = START_S) -> None:
        settings = _with_threads(read_settings(given))
        set_up_log(settings.log_level)
        check_exposure(settings, tokens=read_tokens(settings))
        engine, auto = start_engine(settings)
        self._app = create_app(settings, engine=engine, auto=auto)
        self._start_s = start_s
        self._has_started = False

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Hand the application to Ray, which starts and stops it by its lifespan."""
        return self._app

    async def check_health(self) -> None:
        """Wait for a version at the start, and for the engine at any time.

        Ray sends no request to a replica before the first check is passed. Later an exception or a
        check without an end makes Ray replace the replica. A store that cannot be read does not:
        the version in memory still answers, and another replica would find no other store.
        """
        models: Models = self._app.state.models
        if not self._has_started:
            await _wait_for_model(models, seconds=self._start_s)
            self._has_started = True
        await asyncio.wrap_future(models.shared.batcher.call(_nothing))


async def _wait_for_model(models: Models, *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (reason := models.error) is not None:
        if time.monotonic() > end:
            settings = models.settings
            raise NoModel(
                f"nothing to serve from {settings.models or settings.store} after {seconds:g} s: "
                f"{reason}; learn a task with `dne-train add-task`, or give replicas more time "
                f"({START})"
            )
        await asyncio.sleep(LOOK_S)


def _nothing() -> None:
    """Do nothing, on the engine's thread: it is done when the thread is alive and free."""


def _with_threads(settings: Settings) -> Settings:
    """Take as many threads as Ray gives the replica cores, which it says in OMP_NUM_THREADS."""
    cores = os.environ.get("OMP_NUM_THREADS", "")
    if settings.threads is not None or not cores.isdecimal() or int(cores) < 1:
        return settings
    return settings.model_copy(update={"threads": int(cores)})
