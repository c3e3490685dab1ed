"""dne-serve: serve the version that a channel names."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

from dne_serve.access.auth import check_exposure, check_tls, may_print_link
from dne_serve.access.permission import new_token, read_tokens
from dne_serve.log_lines import set_up_log
from dne_serve.observe.tracing import check_extra
from dne_serve.settings import Settings, load_settings
from dne_serve.webhooks.outbox import read_secrets
from model_store.cli.command import (
    EXIT_OK,
    add_json_option,
    add_version_option,
    print_json,
    run,
)
from model_store.command_line import Parser
from model_store.errors import DneError

if TYPE_CHECKING:
    from dne_serve.engines.base import Engine

ENVIRONMENT_ONLY = frozenset({"admin_token", "webhook_secret"})
_REPEATABLE = frozenset({"allowed_hosts", "canary", "guard", "collect", "webhook"})

log = logging.getLogger("dne_serve")


class _CannotListen(DneError):
    """An address or port that is taken, or is not this machine's."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = vars(build_parser().parse_args(arguments))
    as_json, wanted, measures = (given.pop(name) for name in ("json", "new_token", "measure"))
    if wanted is not None:
        return run(lambda: _make_token(wanted, as_json=as_json))
    settings = {name: _joined(value) for name, value in given.items()}
    if measures:
        return run(lambda: measure(load_settings(**settings), as_json=as_json))
    return run(lambda: serve(load_settings(**settings), as_json=as_json))


def _joined(value: Any) -> Any:
    """Join an option that was given several times, as its variable has it."""
    return ",".join(value) if isinstance(value, list) else value


def build_parser() -> argparse.ArgumentParser:
    """Make one option of each setting. Only given options take the place of the environment."""
    parser = Parser(
        prog="dne-serve",
        description="Serves a classifier that grows: predictions over HTTP from the version that "
        "a channel names, without a pause when it moves.",
        epilog="Every option is also an environment variable: --max-batch is DNE_MAX_BATCH. "
        "The admin token comes from DNE_ADMIN_TOKEN or --admin-token-file, other tokens from "
        "--token-file.",
    )
    add_version_option(parser)
    parser.add_argument(
        "--new-token",
        metavar="NAME=SCOPES",
        help="make a token with some of the scopes predict, read, label and admin, separated by "
        "commas; print it and the line of the token file that lets it in, and end",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure now which engine is fastest here for the version that the channel names, "
        "print and remember it, and end",
    )
    for name, field in Settings.model_fields.items():
        if name in ENVIRONMENT_ONLY:
            continue
        default = "" if field.default in (None, "") else f" (default: {field.default})"
        option = f"--{name.replace('_', '-')}"
        help = f"{field.description}{default}".replace("%", "%%")  # argparse would read a lone %
        if field.annotation is bool:
            # With its opposite, because the environment may have switched it on.
            parser.add_argument(
                option, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help
            )
            continue
        action = "append" if name in _REPEATABLE else "store"
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
        parser.add_argument(
            option,
            action=action,
            default=argparse.SUPPRESS,
            choices=choices,
            metavar=None if choices else name.split("_")[-1].upper(),
            help=help,
        )
    add_json_option(parser)
    return parser


def _make_token(wanted: str, *, as_json: bool) -> int:
    made = new_token(wanted)
    if as_json:
        print_json({"token": made.secret, "line": made.line})
    else:
        print(f"token, for its holder, shown this once:\n  {made.secret}")
        print(f"line for the token file:\n  {made.line}")
    return EXIT_OK


def measure(settings: Settings, *, as_json: bool) -> int:
    set_up_log(settings.log_level)
    from dne_serve.engine_start import measure_now  # takes a second

    return measure_now(settings, as_json=as_json)


def serve(settings: Settings, *, as_json: bool) -> int:
    set_up_log(settings.log_level)
    tokens = read_tokens(settings)
    check_exposure(settings, tokens=tokens)
    check_tls(settings)
    read_secrets(settings)  # a wrong one ends the server before it listens
    check_extra(settings)
    listener = _listen(settings.host, settings.port)
    with listener:
        log.info("starting with %s, channel %s", _place(settings), settings.channel)
        # After the port is ours, because these imports take seconds and the port may be taken.
        from dne_serve.app import create_app
        from dne_serve.engine_start import start_engine
        from dne_serve.wire.server import DrainingServer, server_config

        engine, auto = start_engine(settings)
        log.info("engine %s", engine.choice)
        app = create_app(settings, engine=engine, auto=auto)
        config = server_config(app, settings)
        server = DrainingServer(
            config, drain_s=settings.drain_seconds, on_drain=app.state.models.drain
        )
        # A client that reads the announcement may connect at once: the kernel holds it until we
        # accept.
        listener.listen(config.backlog)
        secret = ""
        if may_print_link(settings, tokens=tokens):
            secret = app.state.models.shared.authorizer.begin_session()
        _announce(settings, listener, engine, secret=secret, as_json=as_json)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _already_handled)
        server.run(sockets=[listener])
    log.info("stopped")
    if app.state.models.is_held:
        _leave()
    return EXIT_OK


def _leave() -> NoReturn:
    """End the process at once. Python would wait for requests to the store, however long it takes
    to answer. Records are there whole or not at all, so nothing is left half-written."""
    log.warning("requests to the store were given up: it has not answered within --grace-seconds")
    logging.shutdown()
    sys.stdout.flush()
    os._exit(EXIT_OK)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise _CannotListen(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _announce(
    settings: Settings, listener: socket.socket, engine: Engine, *, secret: str, as_json: bool
) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_cert is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    log.info(
        "%s: channel %s of %s, backend %s on %s",
        url,
        settings.channel,
        _place(settings),
        engine.backend,
        engine.device,
    )
    # Browsers send nothing behind the # to anybody, and the page takes it out of the address.
    page = "label" if settings.collect or settings.with_trainer else ""
    link = f"{url}/{page}#token={secret}" if secret else None
    if as_json:
        place = "store" if settings.models is None else "models"
        said = {"url": url, place: getattr(settings, place), "channel": settings.channel}
        print_json({**said, "link": link} if link else said)
    elif link:
        print(f"open {link}")
        print("with this link the pages may learn, promote and roll back, until this server ends")
    sys.stdout.flush()


def _place(settings: Settings) -> str:
    """Name what is served, for the log."""
    return f"store {settings.store}" if settings.models is None else f"models {settings.models}"


def _already_handled(number: int, frame: FrameType | None) -> Any:
    """Do nothing: uvicorn raises the signal again after a graceful end."""
