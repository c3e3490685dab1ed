"""Run as a program: publishes and promotes as fast as it can, beside others that do the same.

`racing_promoter LOCATION COUNT SEED` waits for a line, then publishes COUNT children of version 1
and promotes each. It ends with one line of JSON: the versions and the transactions that it was
told are its own, and the numbers of its channel records.
"""

from __future__ import annotations

import json
import sys

from model_store.store.store import Store
from tests.model_store.drafts import prepare


def main(location: str, count: str, seed: str) -> None:
    store = Store.open(location)
    root = store.manifest(1)
    # Made before the race: what is to meet are the publishes.
    prepared = [
        prepare(parent=root, task=f"task-{seed}-{number}", images=1, seed=int(seed) * 1000 + number)
        for number in range(int(count))
    ]
    print("ready", flush=True)
    sys.stdin.readline()
    versions: dict[int, str] = {}
    records: dict[int, int] = {}
    for one in prepared:
        manifest = one.publish(store)
        versions[manifest.version] = manifest.transaction
        record = store.promote(manifest.version, channel="race", actor=f"{seed}@b", reason="")
        records[record.number] = record.target
    print(json.dumps({"versions": versions, "records": records}))


if __name__ == "__main__":
    main(*sys.argv[1:])
