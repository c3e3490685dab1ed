"""Our server while versions come and go, and while more is asked of it than it can do."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.figures import Figure, at_most
from benchmarks.serving.load import FAILED, Seen, Traffic
from benchmarks.serving.servers import Running, Server, running
from model_store.codec import encode_classifier, encode_expert, load_network
from model_store.records.manifest import Draft, Manifest, geometry_of, task_record
from model_store.records.sealing import timestamp
from model_store.spec import ExpertSpec, TaskSpec
from model_store.store.shard import shard_ref
from model_store.store.store import Store

CONNECTIONS = 8
BEFORE_S = 15.0
BETWEEN_S = 0.2
A_CHANGE_S = 0.5
"""More than one takes until it is served: the load must last longer than the changes."""
SERVED_WITHIN_S = 30.0
MORE_CHANGES = 100
"""After those under load: memory is compared after 10 changes and after all."""
CHANNEL = "production"
ACTOR = "benchmark"
OVERLOAD = 10
OVERLOAD_CONNECTIONS = 900
WAIT_S = 10.0
"""The server's default for how long a request may wait before it is refused."""
Measured = tuple[list[Figure], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A version that only has to be published."""

    draft: Draft
    shards: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Served:
    """From when on a version could have answered: the moment in which its change was begun."""

    since_s: float
    version: int


def measure_changes(
    server: Server, *, store: Path, image: bytes, folder: Path, count: int
) -> Measured:
    """Every fourth change publishes a version; the others roll back, resume and promote.

    All versions are version 1 and one task more, so that what is served costs the same before and
    during the changes.
    """
    opened, of = Store.open(str(store)), f"{server.name}: "
    prepared = prepare(opened, count=(count + MORE_CHANGES) // 4 + 2)
    with running(server, store=store, folder=folder, image=image) as live:
        walk = [publish(opened, prepared), publish(opened, prepared)]
        wait_for(live, walk[-1].version)
        traffic = Traffic(
            live.request,
            port=live.port,
            folder=folder,
            connections=CONNECTIONS,
            seconds=BEFORE_S + count * (BETWEEN_S + A_CHANGE_S),
        )
        began_s = time.monotonic()
        time.sleep(BEFORE_S)
        memory = {}
        for number in range(1, count + MORE_CHANGES + 1):
            walk.append(change(opened, number, prepared))
            wait_for(live, walk[-1].version)
            if number <= count:
                time.sleep(BETWEEN_S)
            if number == count:
                ended_s = time.monotonic()
            memory[number] = live.resident_bytes
        seen = traffic.seen()
    before = seen.between(began_s + 2, began_s + BEFORE_S)
    during = seen.between(began_s + BEFORE_S, ended_s)
    print(f"{count} changes in {ended_s - began_s - BEFORE_S:.0f} s", file=sys.stderr)
    return [
        at_most(f"{of}requests that failed during {count} changes", during.failed, 0),
        at_most(f"{of}p99 during the changes ÷ before", _ratio(during, before, 0.99), 1.5),
        at_most(
            f"{of}longest gap between two answers during the changes ÷ before",
            during.longest_gap_s / before.longest_gap_s,
            2,
        ),
        at_most(f"{of}answers of a version that was no longer served", late(during, walk), 0),
        at_most(
            f"{of}memory after {len(memory)} changes ÷ after 10",
            memory[len(memory)] / memory[10],
            1.05,
        ),
    ], {
        f"{of}requests during the changes": len(during.replies),
        f"{of}p99 ms before the changes": 1000 * before.quantile_s(0.99),
        f"{of}p99 ms during the changes": 1000 * during.quantile_s(0.99),
        f"{of}longest gap before the changes, ms": 1000 * before.longest_gap_s,
        f"{of}longest gap during the changes, ms": 1000 * during.longest_gap_s,
        f"{of}memory after 10 changes, MiB": memory[10] / 2**20,
    }


def measure_overload(
    server: Server,
    *,
    store: Path,
    image: bytes,
    folder: Path,
    capacity: float,
    seconds: float,
) -> Measured:
    """Ten times what it can do, whatever it answers."""
    with running(server, store=store, folder=folder, image=image) as live:
        traffic = Traffic(
            live.request,
            port=live.port,
            folder=folder,
            connections=OVERLOAD_CONNECTIONS,
            seconds=seconds,
            rate=OVERLOAD * capacity,
        )
        seen = traffic.seen()
        live.ask()
    accepted = seen.with_status(200)
    refused = seen.with_status(503)
    unanswered = len(seen.replies) - len(accepted) - len(refused)
    return [
        at_most("overload: requests that were neither answered nor refused", unanswered, 0),
        at_most("overload: p99 of the accepted, s", seen.quantile_s(0.99), WAIT_S),
    ], {
        "overload: accepted a second ÷ capacity": seen.per_second / capacity,
        "overload: requests": len(seen.replies),
        "overload: accepted": len(accepted),
        "overload: refused with 503": len(refused),
        "overload: broken connections": len(seen.with_status(FAILED)),
        "overload: due while all connections waited": seen.unsent,
    }


def prepare(store: Store, *, count: int) -> Iterator[Prepared]:
    """Children of version 1, each with an expert of its own. Made before, because making them
    would take time from the server."""
    return iter([_child(store.manifest(1), store, number) for number in range(count)])


def _child(parent: Manifest, store: Store, number: int) -> Prepared:
    torch.manual_seed(number)
    network = load_network(store.read_shard, parent)
    task = TaskSpec(
        name=f"task {number}",
        classes=tuple(f"class {number}-{place}" for place in range(5)),
        expert=ExpertSpec(heads=1),
    )
    network.expand(task)
    expert = encode_expert(network, len(parent.tasks))
    classifier = encode_classifier(network)
    ref = shard_ref("expert", expert)
    draft = Draft(
        parent=parent.version,
        parent_digest=parent.digest,
        transaction=uuid.uuid4().hex,
        network=geometry_of(network.spec),
        preprocessing=parent.preprocessing,
        tasks=(*parent.tasks, task_record(task, expert=ref)),
        classifier=shard_ref("classifier", classifier),
        created=timestamp(),
        software="benchmarks",
    )
    shards = {ref.sha256: expert, draft.classifier.sha256: classifier}
    return Prepared(draft=draft, shards=shards)


def publish(store: Store, prepared: Iterator[Prepared]) -> Served:
    one, began_s = next(prepared), time.monotonic()
    manifest = store.publish(one.draft, shards=one.shards)
    store.promote(manifest.version, channel=CHANNEL, actor=ACTOR, reason="")
    return Served(began_s, manifest.version)


def change(store: Store, number: int, prepared: Iterator[Prepared]) -> Served:
    if number % 4 == 1:
        return publish(store, prepared)
    began_s = time.monotonic()
    if number % 4 == 2:
        record = store.rollback(channel=CHANNEL, to=None, actor=ACTOR, reason="")
    elif number % 4 == 3:
        record = store.resume(channel=CHANNEL, actor=ACTOR, reason="")
    else:
        newest = store.newest()
        assert newest is not None
        record = store.promote(newest - 1, channel=CHANNEL, actor=ACTOR, reason="")
    return Served(began_s, record.target)


def wait_for(live: Running, version: int) -> None:
    deadline_s = time.monotonic() + SERVED_WITHIN_S
    while live.version() != version:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"version {version} is not served")
        time.sleep(0.02)


def late(seen: Seen, walk: list[Served]) -> int:
    """Answers of a version after a later one has answered on the same connection. `walk` is what
    was served, in order; an answer cannot be of what was not yet begun."""
    places: dict[int, int] = {}
    found = 0
    for reply in sorted(seen.with_status(200), key=lambda one: one.ended_s):
        begin = places.get(reply.connection, 0)
        possible = (
            place
            for place in range(begin, len(walk))
            if walk[place].version == reply.version and walk[place].since_s <= reply.ended_s
        )
        place = next(possible, None)
        found += place is None
        places[reply.connection] = begin if place is None else place
    return found


def _ratio(one: Seen, other: Seen, share: float) -> float:
    return one.quantile_s(share) / other.quantile_s(share)
