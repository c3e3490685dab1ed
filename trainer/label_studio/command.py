"""Run `dne-train label-studio push` and `pull`. Neither needs torch."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from model_store.cli.command import EXIT_FAILED, EXIT_OK, print_json
from model_store.store.store import Store
from model_store.tables import counted, printable
from trainer.label_studio.request import account_of, add_label_studio_command, chosen_of

if TYPE_CHECKING:
    from trainer.label_studio.pull import Pulled
    from trainer.label_studio.push import Pushed


def add_command(commands: Any) -> None:
    add_label_studio_command(commands, push=_push, pull=_pull)


def _push(options: argparse.Namespace) -> int:
    account, store = account_of(options), Store.open(options.store)
    from trainer.label_studio.client import LabelStudio
    from trainer.label_studio.push import push

    with LabelStudio(account) as server:
        done = push(
            server,
            chosen_of(options),
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
    account, store = account_of(options), Store.open(options.store)
    from trainer.label_studio.client import LabelStudio
    from trainer.label_studio.pull import MAX_TOLD, pull

    with LabelStudio(account) as server:
        done = pull(server, chosen_of(options), store=store)
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
        print(f"{counted(done.lost, 'picture')} left out, being deleted or damaged")
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
