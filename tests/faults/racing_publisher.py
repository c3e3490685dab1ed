"""Run as a program: `racing_publisher STORE NAME COUNT` publishes COUNT versions on top of
version 1, whatever comes, and prints a line of JSON for each: the version that was acknowledged, or
how it failed. A publish whose outcome is unknown is not counted as done and not undone."""

from __future__ import annotations

import json
import sys
import time
import zlib

from model_store.errors import OutcomeUnknown, StoreError
from model_store.store.store import Store
from tests.model_store.drafts import prepare

PATIENCE_S = 240
PAUSE_S = 0.5


def main(location: str, name: str, count: str) -> None:
    store = Store.open(location)
    first = store.manifest(1)
    done = 0
    end = time.monotonic() + PATIENCE_S
    while done < int(count) and time.monotonic() < end:
        seed = zlib.crc32(f"{name} {done}".encode())
        prepared = prepare(parent=first, task=f"{name}-{done}", images=1, seed=seed)
        transaction = prepared.draft.transaction
        try:
            manifest = prepared.publish(store)
        except StoreError as error:
            unknown = isinstance(error, OutcomeUnknown)
            _say(transaction=transaction, unknown=unknown, error=str(error))
            time.sleep(PAUSE_S)
        else:
            done += 1
            _say(transaction=transaction, version=manifest.version, digest=manifest.digest)


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
