"""Run `dne-train label-studio push` and `pull`. Neither needs torch."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from model_store.cli.command import (
    EXIT_FAILED,
    EXIT_OK,
    add_channel_option,
    add_json_option,
    add_store_option,
    print_json,
)
from model_store.errors import WrongUsage
from model_store.store.store import Store
from model_store.tables import counted, printable

if TYPE_CHECKING:
    from trainer.loop.label_studio import ProjectChoice, Pulled, Pushed
    from trainer.loop.label_studio_client import Account

ABOUT = "label pictures of the inbox with Label Studio"
_DEFAULT_URL = "http://127.0.0.1:8080"
_DEFAULT_TITLE = "dne-serve"


def add_command(commands: Any) -> None:
    top = commands.add_parser("label-studio", help=ABOUT, description=ABOUT)
    below = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    pushing = below.add_parser(
        "push",
        help="import waiting pictures into a project, with predictions",
        description="Imports the pictures of the inbox that wait for a label into a project of "
        "Label Studio, the least certain ones first, with predictions and their scores. What the "
        "project has already is left out, and its tasks without a label get the newest classes.",
    )
    pushing.set_defaults(command=_push)
    _add_options(pushing)
    pushing.add_argument(
        "--limit",
        metavar="N",
        type=_limit,
        default=1000,
        help="import N new tasks at most (default: %(default)s)",
    )
    add_channel_option(pushing)
    pulling = below.add_parser(
        "pull",
        help="write the annotations of a project as labels of the inbox",
        description="Reads the annotations of a project of Label Studio and writes them as labels "
        "of the inbox, with who and when. Cancelled annotations, and those that are there already, "
        "are passed over.",
    )
    pulling.set_defaults(command=_pull)
    _add_options(pulling)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        metavar="URL",
        default=os.environ.get("DNE_LABEL_STUDIO_URL") or _DEFAULT_URL,
        help=f"the address of Label Studio (default: $DNE_LABEL_STUDIO_URL, else {_DEFAULT_URL})",
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
        default=_DEFAULT_TITLE,
        help="the title of the project, which push creates if there is none (default: %(default)s)",
    )
    add_store_option(parser)
    add_json_option(parser)


def _limit(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _push(options: argparse.Namespace) -> int:
    from trainer.loop.label_studio import push
    from trainer.loop.label_studio_client import LabelStudio

    account, store = _account_of(options), Store.open(options.store)
    with LabelStudio(account) as server:
        done = push(
            server,
            _choice_of(options),
            store=store,
            channel=options.channel,
            limit=options.limit,
        )
    if options.json:
        print_json(done.as_json())
    else:
        _tell_pushed(done, url=account.url)
    return EXIT_OK


def _pull(options: argparse.Namespace) -> int:
    from trainer.loop.label_studio import MAX_TOLD, pull
    from trainer.loop.label_studio_client import LabelStudio

    account, store = _account_of(options), Store.open(options.store)
    with LabelStudio(account) as server:
        done = pull(server, _choice_of(options), store=store)
    for why in done.refused[:MAX_TOLD]:
        print(f"refused: {printable(why)}", file=sys.stderr)
    if options.json:
        print_json(done.as_json())
    else:
        _tell_pulled(done)
    return EXIT_FAILED if done.refused else EXIT_OK


def _tell_pushed(done: Pushed, *, url: str) -> None:
    made = "a new project" if done.project.created else f"project {done.project.id}"
    print(f"{counted(done.pushed, 'task')} imported into {made}; {done.there} were there already")
    if done.refreshed:
        print(f"{counted(done.refreshed, 'task')} without a label have the newest classes")
    if done.lost:
        print(f"{counted(done.lost, 'picture')} left out: deleted or damaged")
    if done.left:
        print(f"{counted(done.left, 'picture')} wait for the next push: --limit allows more")
    print(f"label them: {url}/projects/{done.project.id}/data")


def _tell_pulled(done: Pulled) -> None:
    for name, count in sorted(done.classes.items()):
        print(f"{counted(count, 'label')} of {printable(name)}")
    passed = {name: count for name, count in done.outcomes.items() if name != "labelled"}
    others = ", ".join(f"{count} {name}" for name, count in sorted(passed.items()))
    print(f"{counted(done.outcomes['labelled'], 'label')} written{others and f'; {others}'}")
    if done.outcomes["labelled"]:
        print("`dne-train add-task --from-inbox` learns from them")


def _account_of(options: argparse.Namespace) -> Account:
    from trainer.loop.label_studio_client import Account

    token = options.token or os.environ.get("DNE_LABEL_STUDIO_TOKEN") or ""
    if not token:
        raise WrongUsage(
            "a token of Label Studio is needed: set DNE_LABEL_STUDIO_TOKEN, or give --token"
        )
    return Account(url=options.url.rstrip("/"), token=token)


def _choice_of(options: argparse.Namespace) -> ProjectChoice:
    from trainer.loop.label_studio import ProjectChoice

    return ProjectChoice(project=options.project, title=options.title)
