"""Run as a program: publishes and promotes, and asks before every call into the system.

`stepping_publisher LOCATION COUNT` writes a line before each call that could change the disk
(its name), and one after each version and each record that it was told is there (as JSON). After
every line it waits for one: whoever reads may copy the disk meanwhile. In the place of COUNT it
takes one of the kinds of `killed_publisher`, which tells nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from model_store.store.store import Store
from tests.faults.killed_publisher import CALLS, KINDS
from tests.model_store.drafts import prepare


def main(location: str, count: str) -> None:
    store = Store.open(location)
    for name in CALLS:
        setattr(os, name, _asking(getattr(os, name), name))
    if count in KINDS:
        KINDS[count](location)
        return
    for seed in range(1, int(count) + 1):
        manifest = prepare(parent=store.manifest(seed), images=1, seed=seed).publish(store)
        _ask(json.dumps({"version": manifest.version, "digest": manifest.digest}))
        record = store.promote(manifest.version, channel="production", actor="a@b", reason="")
        _ask(json.dumps({"record": record.number, "target": record.target}))


def _ask(line: str) -> None:
    print(line, flush=True)
    sys.stdin.readline()


def _asking(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    def asking(*args: Any, **kwargs: Any) -> Any:
        _ask(name)
        return call(*args, **kwargs)

    return asking


if __name__ == "__main__":
    main(*sys.argv[1:])
