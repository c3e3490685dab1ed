"""Many models on one server: speed, memory, cold starts, fairness and moves under load.

`python -m benchmarks.models --pretrained FILE --cifar cifar100.zip`. One version is learnt by
`dne-train add-task` from ten classes of CIFAR-100, enlarged to photos. The other models are stores
that `Store.publish` makes of it: the same expert, by a hard link, and a classifier of their own,
with noise on its weights. Servers run beside each other and are asked in turns. `--before` is a
checkout of an earlier commit, with its environment; `--bucket` starts SeaweedFS for cold starts.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import load, save

from benchmarks.figures import Figure, at_least, at_most, print_figures
from benchmarks.serving.load import Seen, Traffic
from benchmarks.serving.photos import SIZES, enlarged, jpeg, learn
from benchmarks.serving.servers import PEERS, THREADS, Running, Server, running
from model_store.records.manifest import Draft, Manifest
from model_store.store.shard import shard_ref
from model_store.store.store import Store

CLASSES = 10
NOISE = 0.02
ENGINE = ("--backend", "onnx", "--threads", str(THREADS), "--max-wait-seconds", "60")
CONNECTIONS = (8, 32)
MOVED = 50
OTHERS = 8
"""Models beside the one that floods."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument("--pretrained", type=Path, required=True, help="weights of the backbone")
    parser.add_argument("--cifar", type=Path, required=True, help="CIFAR-100, a folder a class")
    parser.add_argument("--models", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--turns", type=int, default=3, help="that each server takes")
    parser.add_argument("--seconds", type=float, default=8.0, help="of load in a turn")
    parser.add_argument("--before", type=Path, help="a checkout of the commit before")
    parser.add_argument("--bucket", action="store_true", help="cold starts from SeaweedFS too")
    parser.add_argument("--peer", action="store_true", help="ten models beside LitServe's")
    parser.add_argument("--keep", type=Path, help="folder for the stores, for another run")
    parser.add_argument("--only", action="append", default=[], choices=PARTS, help="a part")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(options, Path(options.keep or name))
        for part in options.only or PARTS:
            getattr(bench, part)()
    print_figures(bench.figures, measured=bench.measured, as_json=options.json)
    return 0 if all(figure.reached for figure in bench.figures) else 1


PARTS = ("many", "start", "cold", "flood", "moves", "before", "peer")


class Bench:
    """The stores, and what was measured on them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self.figures: list[Figure] = []
        self.measured: dict[str, float] = {}
        folder.mkdir(parents=True, exist_ok=True)
        photos = folder / "photos"
        if not photos.exists():
            enlarged(options.cifar, photos, count=CLASSES)
        self._one = learn(options.pretrained, photos, folder)
        self._all = folder / "all"
        self._image = jpeg(photos, SIZES["0.3 megapixels"])
        write_models(self._one, self._all, count=options.models)
        self._names = sorted(path.name for path in self._all.iterdir())

    def many(self) -> None:
        """1,000 models, evenly, beside one: throughput, p99 and memory."""
        with self._server("one") as one, self._server("many") as many:
            before = many.resident_bytes
            self._ask(many, connections=8, seconds=2.0, models=self._names[:1])
            alone = many.resident_bytes
            self._warm(many, self._names)
            self._note("MiB of a server with many models, before the first", before / 2**20)
            self._note("MiB of a server with many models, one of them warm", alone / 2**20)
            for connections in CONNECTIONS:
                rates, tails = [], []
                for _ in range(self._options.turns):
                    single = self._ask(one, connections=connections)
                    spread = self._ask(many, connections=connections, models=self._names)
                    rates.append(spread.per_second / single.per_second)
                    tails.append(spread.quantile_s(0.99) / single.quantile_s(0.99))
                    self._tell(f"{connections} connections", single, spread)
                what = f"{len(self._names)} models ÷ one, {connections} connections"
                self.figures.append(at_least(f"{what}: throughput", median(rates), 0.95))
                self.figures.append(at_most(f"{what}: p99", median(tails), 1.2))
            more = (many.resident_bytes - alone) / 2**20
            self.figures.append(
                at_most(f"MiB of {len(self._names)} warm models above one", more, 150)
            )

    def start(self) -> None:
        """Start to ready, with one store and with many."""
        for kind in ("one", "many"):
            took = [self._start_s(kind) for _ in range(3)]
            self._note(f"s from start to ready, {kind}", median(took))
        self.figures.append(
            at_most(f"s from start to ready, {len(self._names)} models", median(took), 5)
        )

    def cold(self) -> None:
        """The first answer of a cold model, less one of a warm one."""
        with self._server("many") as many:
            self._cold(many, "a directory", most_ms=50)
        if self._options.bucket:
            with bucket(self._folder / "weed", self._all, self._names[:60]) as environment:
                server = replace(self._made("many", "--models", "s3://tests/all"))
                server = replace(server, variables=environment)
                with self._run(server, path=f"/models/{self._names[0]}/predict") as many:
                    self._cold(many, "SeaweedFS", most_ms=300)

    def flood(self) -> None:
        """One model floods with ten times its share; the others ask half of theirs."""
        with self._server("many") as many:
            names = self._names[: OTHERS + 1]
            self._warm(many, names)
            all_of_it = self._ask(many, connections=16, models=names).per_second
            share = all_of_it / len(names)
            self._note("requests/s of nine models at 16 connections", all_of_it)
            quiet, loud = [], []
            for _ in range(self._options.turns):
                rate = OTHERS * share / 2
                quiet.append(self._others(many, names[1:], rate))
                with self._traffic(many, connections=64, rate=10 * share, models=names[:1]) as one:
                    loud.append(self._others(many, names[1:], rate))
                flood = one.result()
                self._note("flooding model: answered", float(len(flood.with_status(200))))
                self._note("flooding model: refused", float(len(flood.with_status(503))))
            ratios = [
                b.quantile_s(0.99) / a.quantile_s(0.99) for a, b in zip(quiet, loud, strict=True)
            ]
            self._note(
                "p99 of the others alone, ms", 1000 * median(a.quantile_s(0.99) for a in quiet)
            )
            self._note(
                "p99 of the others beside a flood, ms",
                1000 * median(b.quantile_s(0.99) for b in loud),
            )
            self.figures.append(at_most("one floods: p99 of the others ÷ alone", median(ratios), 2))
            failed = sum(one.failed for one in loud)
            self.figures.append(
                at_most("one floods: requests of the others that failed", failed, 0)
            )

    def moves(self) -> None:
        """Fifty models publish, and are moved to and fro, under load over all."""
        names = self._names[: 4 * MOVED]
        moved = names[:MOVED]
        stores = {name: Store.open(str(self._all / name)) for name in moved}
        for name, store in stores.items():
            if len(store.versions()) < 2:
                publish(store, store.manifest(1), seed=hash_of(name) + 1, parent=store.manifest(1))
        with self._server("many") as many:
            self._warm(many, names)
            seconds = 4 * self._options.seconds
            with (
                self._traffic(many, connections=4, seconds=seconds, models=moved) as on_moved,
                self._traffic(many, connections=4, seconds=seconds, models=names[MOVED:]) as beside,
            ):
                count = move_all(stores, seconds=seconds - 1)
            seen, others = on_moved.result(), beside.result()
        self._note("moves of channels under load", float(count))
        self._note("answers of moved models", float(len(seen.replies)))
        self._note(
            "answers of moved models by version 2", float(sum(r.version == 2 for r in seen.replies))
        )
        self._note("answers of other models", float(len(others.replies)))
        strange = sum(one.version not in (1, 2) for one in seen.with_status(200))
        strange += sum(one.version != 1 for one in others.with_status(200))
        self.figures.append(at_most("moves: requests that failed", seen.failed + others.failed, 0))
        self.figures.append(at_most("moves: answers by a version that was not named", strange, 0))

    def before(self) -> None:
        """`--store` now beside the commit before."""
        if self._options.before is None:
            return
        place = self._options.before
        program = str(place / ".venv/bin/dne-serve")
        earlier = replace(
            self._made("before", "--store", str(self._one)),
            command=(program, "--store", str(self._one), "--port", "{port}", *ENGINE),
            variables={"PYTHONPATH": str(place)},
        )
        with self._server("one") as now, self._run(earlier, path="/predict") as then:
            for connections in (1, *CONNECTIONS):
                ratios = []
                for _ in range(self._options.turns):
                    old = self._ask(then, connections=connections)
                    new = self._ask(now, connections=connections)
                    self._tell(f"before and now, {connections} connections", old, new)
                    ratios.append(new.per_second / old.per_second)
                what = f"--store ÷ the commit before, {connections} connections: throughput"
                self.figures.append(at_least(what, median(ratios), 0.98))

    def peer(self) -> None:
        """Ten models beside LitServe's, with the same weights."""
        if not self._options.peer:
            return
        names = self._names[:10]
        litserve = replace(
            PEERS[0], variables={**PEERS[0].variables, "BENCH_MODELS": str(len(names))}
        )
        first = f"/models/{names[0]}/predict"
        with self._server("many") as ours, self._run(litserve, path=first) as theirs:
            self._warm(ours, names)
            ratios = []
            for _ in range(self._options.turns):
                own = self._ask(ours, connections=8, models=names)
                other = self._ask(theirs, connections=8, models=names)
                self._tell("ten models, ours and LitServe", own, other)
                ratios.append(own.per_second / other.per_second)
            memory = [tree_bytes(one.process.pid) for one in (ours, theirs)]
        self._note("MiB of ten models, ours", memory[0] / 2**20)
        self._note("MiB of ten models, LitServe", memory[1] / 2**20)
        self.figures.append(at_most("ten models: memory ÷ LitServe's", memory[0] / memory[1], 0.25))
        self.figures.append(at_least("ten models: throughput ÷ LitServe's", median(ratios), 1.0))

    # What the parts share

    def _made(self, name: str, *place: str) -> Server:
        command = ("dne-serve", *place, "--port", "{port}", *ENGINE)
        return Server(name=name, command=command)

    @contextmanager
    def _server(self, kind: str) -> Iterator[Running]:
        place = ("--store", str(self._one)) if kind == "one" else ("--models", str(self._all))
        path = "/predict" if kind == "one" else f"/models/{self._names[0]}/predict"
        with self._run(self._made(kind, *place), path=path) as live:
            yield live

    @contextmanager
    def _run(self, server: Server, *, path: str) -> Iterator[Running]:
        """Run a server, and ask it at a path until it answers."""
        made = replace(server, path=path)
        with running(made, store=self._one, folder=self._folder, image=self._image) as live:
            yield live

    def _ask(
        self,
        live: Running,
        *,
        connections: int,
        seconds: float | None = None,
        models: Sequence[str] = (),
    ) -> Seen:
        with self._traffic(live, connections=connections, seconds=seconds, models=models) as asked:
            pass
        return asked.result()

    @contextmanager
    def _traffic(
        self,
        live: Running,
        *,
        connections: int,
        seconds: float | None = None,
        rate: float | None = None,
        models: Sequence[str] = (),
    ) -> Iterator[_Asked]:
        request = replace(live.request, path="/models/{model}/predict") if models else live.request
        traffic = Traffic(
            request,
            port=live.port,
            folder=self._folder,
            connections=connections,
            seconds=seconds or self._options.seconds,
            rate=rate,
            models=models,
        )
        asked = _Asked(traffic)
        yield asked
        asked.result()

    def _others(self, live: Running, names: Sequence[str], rate: float) -> Seen:
        with self._traffic(live, connections=64, rate=rate, models=names) as asked:
            pass
        return asked.result()

    def _warm(self, live: Running, names: Sequence[str]) -> None:
        def load_one(name: str) -> None:
            ask_model(live, name)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(load_one, names))

    def _cold(self, live: Running, place: str, *, most_ms: float) -> None:
        first, again = [], []
        for name in self._names[1:51]:
            first.append(ask_model(live, name))
            again.append(min(ask_model(live, name) for _ in range(3)))
        more = [1000 * (cold - warm) for cold, warm in zip(first, again, strict=True)]
        self._note(f"ms, the slowest of 50 cold models from {place}", max(more))
        self.figures.append(
            at_most(
                f"ms of a cold model's first answer above a warm one, from {place}",
                median(more),
                most_ms,
            )
        )

    def _start_s(self, kind: str) -> float:
        place = ("--store", str(self._one)) if kind == "one" else ("--models", str(self._all))
        program = Path(sys.executable).with_name("dne-serve")
        began = time.monotonic()
        process = subprocess.Popen(
            [str(program), *place, "--port", "0", "--json", *ENGINE],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            while True:
                try:
                    with urllib.request.urlopen(f"{url}/readyz", timeout=10):
                        return time.monotonic() - began
                except OSError:
                    time.sleep(0.02)
        finally:
            process.terminate()
            process.wait()

    def _note(self, name: str, value: float) -> None:
        self.measured[name] = value
        print(f"{name}: {value:.2f}", file=sys.stderr, flush=True)

    def _tell(self, what: str, *seen: Seen) -> None:
        told = [
            f"{one.per_second:.1f}/s, p99 {1000 * one.quantile_s(0.99):.0f} ms, {one.failed} failed"
            for one in seen
        ]
        print(f"{what}: {' | '.join(told)}", file=sys.stderr, flush=True)
        self.figures += [at_most(f"{what}: failed", one.failed, 0) for one in seen if one.failed]


class _Asked:
    """Traffic under way, and what it saw."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._seen: Seen | None = None

    def result(self) -> Seen:
        if self._seen is None:
            self._seen = self._traffic.seen()
        return self._seen


def hash_of(name: str) -> int:
    return int(name[1:])


def write_models(one: Path, folder: Path, *, count: int) -> None:
    """Make stores `m0000`, … of the version of another one."""
    base = Store.open(str(one))
    manifest = base.manifest(1)
    for number in range(count):
        place = folder / f"m{number:04}"
        if place.exists():
            continue
        store = Store.create(str(place))
        for ref in manifest.experts:
            link = Path("shards", ref.sha256[:2], f"{ref.sha256}.safetensors")
            (place / link).parent.mkdir(parents=True, exist_ok=True)
            os.link(one / link, place / link)
        made = publish(
            store,
            manifest,
            seed=2 * number,
            classifier=base.read_shard(manifest.classifier),
            doubt=base,
        )
        store.promote(made.version, channel="production", actor="benchmark", reason="")


def publish(
    store: Store,
    like: Manifest,
    *,
    seed: int,
    parent: Manifest | None = None,
    classifier: bytes | None = None,
    doubt: Store | None = None,
) -> Manifest:
    """Publish a version with the expert of another one, and noise on its classifier."""
    tensors = load(classifier or store.read_shard(like.classifier))
    draw = np.random.default_rng(seed)
    for name, values in tensors.items():
        noise = draw.standard_normal(values.shape).astype(np.float32)
        tensors[name] = values + NOISE * np.float32(np.abs(values).mean()) * noise
    data = save(tensors)
    ref = shard_ref("classifier", data)
    shards = {ref.sha256: data}
    if like.doubt is not None and doubt is not None:
        shards[like.doubt.sha256] = doubt.read_shard(like.doubt)
    kept = {name: getattr(like, name) for name in Draft.model_fields if name != "format"}
    draft = Draft(
        **{
            **kept,
            "classifier": ref,
            "transaction": uuid.uuid4().hex,
            "parent": None if parent is None else parent.version,
            "parent_digest": None if parent is None else parent.digest,
            "metrics": like.metrics.model_copy(update={"shown": ()}),
            "memory": (),
            "held_out": (),
            "statistics": (),
        }
    )
    return store.publish(draft, shards=shards)


def move_all(stores: Mapping[str, Store], *, seconds: float) -> int:
    """Move all channels to and fro, four at a time, until the time is over."""
    end, count, lock = time.monotonic() + seconds, 0, threading.Lock()

    def go_on(mine: Sequence[Store]) -> None:
        nonlocal count
        while True:
            for store in mine:
                if time.monotonic() >= end:
                    return
                head = store.head("production")
                to = 1 if head is not None and head.target == 2 else 2
                store.promote(to, channel="production", actor="benchmark", reason="")
                with lock:
                    count += 1
                time.sleep(0.01)

    every = list(stores.values())
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(go_on, [every[place::4] for place in range(4)]))
    return count


def ask_model(live: Running, name: str) -> float:
    """Ask a model once, and return the seconds until its answer."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    headers = {"Content-Type": live.request.kind}
    connection.request("POST", f"/models/{name}/predict", live.request.body, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"model {name} answers {answer.status}: {text[:300]!r}")
    return time.monotonic() - began


def tree_bytes(pid: int) -> int:
    """Count the memory of a process and its descendants, each page once where they share it."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            total += 1024 * int(line.split()[1])
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            total += tree_bytes(int(child))
    return total


@contextmanager
def bucket(folder: Path, stores: Path, names: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """Run SeaweedFS with some of the stores in it."""
    from tests.s3_server import BUCKET, SeaweedFS

    shutil.rmtree(folder, ignore_errors=True)
    server = SeaweedFS(folder)
    server.start()
    try:
        environment = dict(server.s3.environment)
        program = Path(sys.executable).with_name("dne-store")
        for name in names:
            command = [
                program,
                "copy",
                "--store",
                stores / name,
                "--to",
                f"s3://{BUCKET}/all/{name}",
            ]
            subprocess.run(
                list(map(str, command)),
                check=True,
                env={**os.environ, **environment},
                stdout=subprocess.DEVNULL,
            )
        yield {**environment, "DNE_CACHE": str(folder / "cache")}
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
