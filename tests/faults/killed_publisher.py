"""Run as a program: publishes again and again, and is killed before every system call once.

`killed_publisher FOLDER KIND` makes FOLDER/1, FOLDER/2, … : in folder N a child process got as
far as its N-th call into the operating system. The last one was not killed any more.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model_store.maintenance.forget import delete_version
from model_store.maintenance.gc import collect_garbage
from model_store.store.store import Store
from tests.model_store.drafts import prepare, publish_lineage

CALLS = ("open", "mkdir", "write", "fsync", "link", "unlink", "close")


def publish_child(location: str) -> None:
    store = Store.create(location)
    prepare(parent=store.manifest(1), images=1, seed=1).publish(store)


def roll_back(location: str) -> None:
    Store.open(location).rollback(channel="production", to=1, actor="a@b", reason="")


def create_store(location: str) -> None:
    Store.create(f"{location}/fresh")


def borrow(location: str) -> None:
    """The whole life of a borrower beside the store, which deletes the version it borrows from."""
    shared = Store.open(location)
    borrower = Store.create(f"{location}-acme", alternates=[location])
    prepare(images=1).publish(borrower)
    prepare(images=1, seed=9).publish(shared)
    shared.promote(2, channel="production", actor="a@b", reason="")
    delete_version(shared, 1, actor="a@b", reason="")
    for _ in range(2):
        collect_garbage(shared, dry_run=False, grace_s=0.0)


KINDS: dict[str, Callable[[str], None]] = {
    "publish": publish_child,
    "rollback": roll_back,
    "create": create_store,
    "borrow": borrow,
}


def main(folder: str, kind: str) -> None:
    template = Path(folder) / "template"
    publish_lineage(Store.create(str(template)), 1)
    for number in itertools.count(1):
        location = Path(folder) / str(number)
        shutil.copytree(template, location)
        child = os.fork()
        if child == 0:
            _kill_before_call(number)
            KINDS[kind](str(location))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))


def _kill_before_call(number: int) -> None:
    calls = itertools.count(1)
    for name in CALLS:
        setattr(os, name, _counted(getattr(os, name), calls, number))


def _counted(
    call: Callable[..., Any], calls: itertools.count[int], last: int
) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return counted


if __name__ == "__main__":
    main(*sys.argv[1:])
