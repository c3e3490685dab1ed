"""Measure the loop from answers to labels: what collecting costs the answers, and a large inbox.

    python -m benchmarks.loop [--rounds N] [--seconds S] [--items N] [--json]
        [--cifar cifar100.zip --pretrained vit_tiny_patch16_224.safetensors]

Throughput: two servers of the same version, one of them with `--collect "score<…"`, the bound
chosen so that a tenth of the pictures match, and with caps that are not met. They take turns. There
are 3,000 different pictures of 320 × 240 pixels.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import resource
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.figures import Figure, at_least, at_most, print_figures
from benchmarks.loop.labelling import measure_labelling
from benchmarks.loop.learning import measure_learning
from benchmarks.serving.one_server import OwnServer, made_up_photo, one_version, own_server
from model_store.loop.item_names import picture_name
from model_store.records.inbox import ItemRecord, KeptPicture, TopClass

OPTIONS = ("--backend", "onnx", "--log-level", "warning")
PICTURES = 3000
SAMPLE = 300
CONNECTIONS = 8
MATCHING = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure collecting, and a large inbox.")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each server")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of a turn")
    parser.add_argument("--items", type=int, default=100_000, help="items of the large inbox")
    parser.add_argument(
        "--cifar", type=Path, help="cifar100.zip: from Learn to served, and keys to label 60 photos"
    )
    parser.add_argument("--pretrained", type=Path, help="the vision transformer to begin with")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    measured: dict[str, float] = {}
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        location = Path(folder) / "models"
        one_version(location)
        if options.rounds:
            figures += measure_collecting(location, options.rounds, options.seconds, measured)
        if options.items:
            figures += measure_inbox(location, options.items, measured)
        if options.cifar:
            for measure in (measure_learning, measure_labelling):
                figures += measure(
                    Path(folder),
                    cifar=options.cifar,
                    pretrained=options.pretrained,
                    measured=measured,
                )
    print_figures(figures, measured=measured, as_json=options.json)


def measure_collecting(
    location: Path, rounds: int, seconds: float, measured: dict[str, float]
) -> list[Figure]:
    """Compare the throughput and the 99th percentile with and without collecting, in turns."""
    bodies = [made_up_photo(seed) for seed in range(PICTURES)]
    bound = _bound(location, bodies)
    rules = f"score<{bound:.6f},per-hour=1000000,total=1000000"
    rates: dict[str, list[float]] = {"off": [], "on": []}
    tails: dict[str, list[float]] = {"off": [], "on": []}
    with (
        own_server(location, *OPTIONS) as off,
        own_server(location, *OPTIONS, "--collect", rules) as on,
    ):
        for _ in range(rounds + 1):  # the first turn of each warms up
            for name, server in (("off", off), ("on", on)):
                took = _load(server, bodies, seconds=seconds)
                rates[name].append(len(took) / seconds)
                tails[name].append(float(np.quantile(took, 0.99)))
        counted = _metrics(on.url)
    pairs = [b / a for a, b in zip(rates["off"][1:], rates["on"][1:], strict=True)]
    tail_pairs = [b / a for a, b in zip(tails["off"][1:], tails["on"][1:], strict=True)]
    offered = sum(counted.values())
    asked = sum(rates["on"]) * seconds
    measured |= {
        "requests/s off": median(rates["off"][1:]),
        "requests/s on": median(rates["on"][1:]),
        "p99 off (ms)": 1000 * median(tails["off"][1:]),
        "p99 on (ms)": 1000 * median(tails["on"][1:]),
        "share that matches": offered / asked,
        **{f"pictures {name}": number for name, number in counted.items()},
    }
    return [
        at_least("throughput with collecting / without", median(pairs), 0.97),
        at_most("p99 with collecting / without", median(tail_pairs), 1.1),
    ]


def measure_inbox(location: Path, items: int, measured: dict[str, float]) -> list[Figure]:
    """Time the first page of a large inbox over HTTP, and the memory that the server gains."""
    _fill(location, items)
    with own_server(location, *OPTIONS) as server:
        url, before = server.url, _resident_bytes(server)
        first = _timed(f"{url}/inbox?limit=100&state=unlabelled")
        after_first = _resident_bytes(server)
        for order in ("newest", "uncertain", "unknown", "disagreeing"):
            measured[f"page by {order} (s)"] = _timed(f"{url}/inbox?limit=100&order={order}")
        time.sleep(20)
        measured["page after a new listing (s)"] = _timed(f"{url}/inbox?limit=100")
        gained = max(after_first, _resident_bytes(server)) - before
    return [
        at_most(f"first page of {items} items (s)", first, 1.0),
        at_most("memory for them (MiB)", gained / (1 << 20), 50.0),
    ]


def _bound(location: Path, bodies: list[bytes]) -> float:
    """Find the score that a tenth of the pictures are below."""
    with own_server(location, *OPTIONS) as server:
        scores = [_predict(server.url, body)["predictions"][0]["score"] for body in bodies[:SAMPLE]]
    return float(np.quantile(scores, MATCHING))


_PLACE = count()


def _predict(url: str, body: bytes) -> dict[str, list[dict[str, float]]]:
    headers = {"Content-Type": "image/jpeg"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/predict", body, headers)) as answer:
        found: dict[str, list[dict[str, float]]] = json.load(answer)
    return found


def _load(server: OwnServer, bodies: list[bytes], *, seconds: float) -> list[float]:
    """Send pictures over some connections for a time, and return how long each answer took."""
    until = time.perf_counter() + seconds

    def send(_: int) -> list[float]:
        connection = http.client.HTTPConnection(server.address)
        took = []
        while (began := time.perf_counter()) < until:
            headers = {"Content-Type": "image/jpeg"}
            connection.request("POST", "/predict", bodies[next(_PLACE) % len(bodies)], headers)
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                took.append(time.perf_counter() - began)
        connection.close()
        return took

    with ThreadPoolExecutor(CONNECTIONS) as clients:
        return [one for some in clients.map(send, range(CONNECTIONS)) for one in some]


def _metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    found = {"kept": 0.0}
    for line in lines:
        if line.startswith("dne_collected_images_total "):
            found["kept"] = float(line.split()[-1])
        if line.startswith("dne_collect_dropped_images_total{"):
            found[f"dropped: {line.split(chr(34))[1]}"] = float(line.split()[-1])
    return found


def _timed(url: str) -> float:
    began = time.perf_counter()
    with urllib.request.urlopen(url) as answer:
        json.load(answer)
    return time.perf_counter() - began


def _resident_bytes(server: OwnServer) -> int:
    """Read the resident memory of a server."""
    pages = Path(f"/proc/{server.pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def _fill(location: Path, items: int) -> None:
    """Write items as files, without the sync that a server makes for each."""
    from model_store.loop.item_names import item_name, new_id
    from model_store.records.sealing import seal_record

    chance = np.random.default_rng(0)
    since = datetime.now(UTC) - timedelta(days=20)
    for number in range(items):
        data = number.to_bytes(8)
        score = float(chance.uniform(0.05, 1))
        record = ItemRecord(
            id=new_id(since + timedelta(seconds=17 * number)),
            time="2026-11-17T12:00:00.000000Z",
            picture=KeptPicture(
                sha256=hashlib.sha256(data).hexdigest(),
                bytes=len(data),
                type="image/png",
                width=8,
                height=8,
                dhash=f"{int(chance.integers(1 << 62)):016x}",
            ),
            channel="production",
            version=1,
            top=(TopClass(label="a", score=score),),
            margin=score,
            unknown=bool(chance.random() < 0.2),
            unknown_score=float(chance.random()),
            rules=("score<0.6",),
            transaction=f"{number:032x}",
        )
        for name, content in (
            (item_name(record.id), seal_record(record)),
            (picture_name(record), data),
        ):
            path = location / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    os.sync()


if __name__ == "__main__":
    main()
