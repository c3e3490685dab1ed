"""dne-serve: serves the version that a channel names."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from dne_serve.settings import Settings, load_settings
from model_store.command import (
    EXIT_OK,
    add_json_option,
    add_version_option,
    print_json,
    run,
)
from model_store.errors import DneError, StoreNotFound

ENVIRONMENT_ONLY = frozenset({"admin_token"})

log = logging.getLogger("dne_serve")


class CannotListen(DneError):
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    given = vars(build_parser().parse_args(arguments))
    as_json = given.pop("json")
    return run(lambda: serve(load_settings(**given), as_json=as_json))


def build_parser() -> argparse.ArgumentParser:
    """One option a setting. Only options that were given take the place of the environment."""
    parser = argparse.ArgumentParser(
        prog="dne-serve",
        description="Serves a classifier that grows: predictions over HTTP from the version that "
        "a channel names, without a pause when it moves.",
        epilog="Every option is also an environment variable: --max-batch is DNE_MAX_BATCH. "
        "The admin routes are open to the token in DNE_ADMIN_TOKEN or --admin-token-file.",
    )
    add_version_option(parser)
    for name, field in Settings.model_fields.items():
        if name in ENVIRONMENT_ONLY:
            continue
        default = "" if field.default is None else f" (default: {field.default})"
        option = f"--{name.replace('_', '-')}"
        help = f"{field.description}{default}".replace("%", "%%")  # which argparse would read
        if field.annotation is bool:
            # With its opposite, because the environment may have switched it on.
            parser.add_argument(
                option, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help
            )
            continue
        metavar = name.split("_")[-1].upper()
        parser.add_argument(option, default=argparse.SUPPRESS, metavar=metavar, help=help)
    add_json_option(parser)
    return parser


def serve(settings: Settings, *, as_json: bool) -> int:
    _set_up_log(settings.log_level)
    listener = _listen(settings.host, settings.port)
    with listener:
        # After the port is ours, because these imports take seconds and the port may be taken.
        import uvicorn

        from dne_serve.app import create_app
        from dne_serve.engine import choose_engine
        from model_store.store import Store

        with suppress(StoreNotFound):  # one that is absent may come; any other fault stays
            Store.open(settings.store)
        engine = choose_engine(
            settings.backend,
            device=settings.device,
            threads=settings.threads,
            max_batch=settings.max_batch,
        )
        config = uvicorn.Config(
            create_app(settings, engine=engine),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=settings.grace_seconds,
        )
        # Whoever reads the announcement may connect at once: the kernel holds it until we accept.
        listener.listen(config.backlog)
        _announce(settings, listener, engine.device, as_json=as_json)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _already_handled)
        uvicorn.Server(config).run(sockets=[listener])
    log.info("stopped")
    return EXIT_OK


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _announce(settings: Settings, listener: socket.socket, device: str, *, as_json: bool) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info(
        "%s: channel %s of %s, backend %s on %s",
        url,
        settings.channel,
        settings.store,
        settings.backend,
        device,
    )
    if as_json:
        print_json({"url": url, "store": settings.store, "channel": settings.channel})
        sys.stdout.flush()


def _already_handled(number: int, frame: FrameType | None) -> Any:
    """uvicorn raises the signal again after a graceful end; by then there is nothing left to do."""


def _set_up_log(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # clients' faults: we answer 400
