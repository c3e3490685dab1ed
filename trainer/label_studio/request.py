"""Describe the requests of `dne-train label-studio`, and add its options."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from model_store.cli.command import (
    Command,
    add_channel_option,
    add_json_option,
    add_store_option,
)
from model_store.errors import WrongUsage

ABOUT = "label pictures of the inbox with Label Studio"
DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_TITLE = "dne-serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The server, and the token of a person who works there."""

    url: str
    token: str

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise WrongUsage(
                f"--url {self.url!r} is not the address of a server: "
                "give one such as http://127.0.0.1:8080"
            )
        if parts.username or parts.password:
            raise WrongUsage("--url holds a name or password: give the token with --token alone")
        if not self.token.isascii() or not self.token.isprintable() or " " in self.token:
            raise WrongUsage("--token is no token: copy it from Account & Settings in Label Studio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The project: by its number, or by its title."""

    project: int | None
    title: str


def account_of(options: argparse.Namespace) -> Account:
    token = options.token or os.environ.get("DNE_LABEL_STUDIO_TOKEN") or ""
    if not token:
        raise WrongUsage(
            "a token of Label Studio is needed: set DNE_LABEL_STUDIO_TOKEN, or give --token"
        )
    return Account(url=options.url.rstrip("/"), token=token)


def chosen_of(options: argparse.Namespace) -> Chosen:
    return Chosen(project=options.project, title=options.title)


def add_label_studio_command(commands: Any, *, push: Command, pull: Command) -> None:
    top = commands.add_parser("label-studio", help=ABOUT, description=ABOUT)
    below = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    one = below.add_parser(
        "push",
        help="import waiting pictures into a project, with predictions",
        description="Imports the pictures of the inbox that wait for a label into a project of "
        "Label Studio, the least certain ones first, with predictions and their scores. What the "
        "project has already is left out, and its tasks without a label get the newest classes.",
    )
    one.set_defaults(command=push)
    _add_options(one)
    one.add_argument(
        "--limit",
        metavar="N",
        type=_limit,
        default=1000,
        help="import N new tasks at most (default: %(default)s)",
    )
    add_channel_option(one)
    two = below.add_parser(
        "pull",
        help="write the annotations of a project as labels of the inbox",
        description="Reads the annotations of a project of Label Studio and writes them as labels "
        "of the inbox, with who and when. Cancelled annotations, and those that are there already, "
        "are passed over.",
    )
    two.set_defaults(command=pull)
    _add_options(two)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        metavar="URL",
        default=os.environ.get("DNE_LABEL_STUDIO_URL") or DEFAULT_URL,
        help=f"the address of Label Studio (default: $DNE_LABEL_STUDIO_URL, else {DEFAULT_URL})",
    )
    parser.add_argument(
        "--token",
        metavar="T",
        help="the access token of an account there (default: $DNE_LABEL_STUDIO_TOKEN, which "
        "others on this machine cannot see)",
    )
    parser.add_argument(
        "--project",
        metavar="ID",
        type=_limit,
        help="the number of the project (default: the one that --title names)",
    )
    parser.add_argument(
        "--title",
        metavar="T",
        default=DEFAULT_TITLE,
        help="the title of the project, which push creates if there is none (default: %(default)s)",
    )
    add_store_option(parser)
    add_json_option(parser)


def _limit(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
