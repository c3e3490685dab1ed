"""Measure the time from *Learn* to a served version: 40 photos of 2 new classes in the inbox.

The store begins with a pre-trained vision transformer and ten classes. The server has a worker
beside it (`--with-trainer`), and serves all the while.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import time
import urllib.request
import uuid
import zipfile
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.figures import Figure, at_most
from benchmarks.serving.one_server import own_server
from model_store.loop.inbox import Inbox, Judgement
from model_store.loop.item_names import new_id
from model_store.records.inbox import ItemRecord, KeptPicture, TopClass
from model_store.store.store import Store

TRAIN = (sys.executable, "-c", "import sys; from trainer.cli import main; sys.exit(main())")
OLD = 10
IMAGES = 40
NEW = 2
PHOTOS = 20
SIZE = 224
TOKEN = "a-token-for-a-benchmark"
LONGEST_S = 480


def measure_learning(
    folder: Path, *, cifar: Path, pretrained: Path, measured: dict[str, float]
) -> list[Figure]:
    """Ask for a job with two new classes, and wait until the server answers with their version."""
    location = folder / "learnt"
    os.environ["DNE_CACHE"] = str(folder / "cache")  # no tokens of an earlier run
    with zipfile.ZipFile(cifar) as archive:
        names = sorted({name.split("/")[1] for name in archive.namelist()})[: OLD + NEW]
        for name in names[:OLD]:
            write_photos(archive, name, folder / "data" / name)
        learn_first(location, folder / "data", pretrained)
        _label(location, {name: photos(archive, name, PHOTOS) for name in names[OLD:]})
    with own_server(location, "--with-trainer", admin_token=TOKEN) as server:
        url = server.url
        time.sleep(15)  # the worker has started, as it has when a person has labelled
        began = time.perf_counter()
        job = ask(f"{url}/jobs", {"reason": "benchmark"})["id"]
        until(lambda: ask(f"{url}/readyz")["version"] > 1)
        served_s = time.perf_counter() - began
        until(lambda: ask(f"{url}/jobs/{job}")["state"] == "promoted")
        verdict = ask(f"{url}/jobs/{job}")["versions"][-1]
    measured["accuracy of old classes before"] = verdict["old_before"]["share"]
    measured["accuracy of old classes after"] = verdict["old_after"]["share"]
    measured["delta (KiB)"] = verdict["delta_bytes"] / 1024
    return [at_most(f"from Learn to served, {NEW * PHOTOS} photos (s)", served_s, 60.0)]


def learn_first(location: Path, data: Path, pretrained: Path) -> None:
    options = ["--data", data, "--pretrained", pretrained, "--normalise", "half"]
    command = [*TRAIN, "add-task", *map(str, options), "--store", str(location)]
    subprocess.run(command, check=True)


def photos(archive: zipfile.ZipFile, name: str, count: int, *, part: str = "train") -> list[bytes]:
    """Read images of a class, as large as photos of the inbox are."""
    files = [one for one in archive.namelist() if one.startswith(f"{part}/{name}/")][:count]
    found = []
    for file in files:
        written = io.BytesIO()
        picture = Image.open(io.BytesIO(archive.read(file))).convert("RGB")
        picture.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(written, "JPEG", quality=90)
        found.append(written.getvalue())
    return found


def write_photos(archive: zipfile.ZipFile, name: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, data in enumerate(photos(archive, name, IMAGES)):
        (folder / f"{number:03d}.jpg").write_bytes(data)


def _label(location: Path, photos: dict[str, list[bytes]]) -> None:
    inbox = Inbox(Store.open(str(location)).objects)
    for name, pictures in photos.items():
        for data in pictures:
            record = _item(data)
            inbox.add(record, data)
            inbox.judge(record.id, Judgement.of_class(name), actor="benchmark")


def _item(data: bytes) -> ItemRecord:
    digest = hashlib.sha256(data).hexdigest()
    return ItemRecord(
        id=new_id(),
        time="2026-11-17T12:00:00.000000Z",
        picture=KeptPicture(
            sha256=digest,
            bytes=len(data),
            type="image/jpeg",
            width=SIZE,
            height=SIZE,
            dhash=digest[:16],
        ),
        channel="production",
        version=1,
        top=(TopClass(label="apple", score=0.3),),
        margin=0.1,
        unknown=True,
        unknown_score=0.9,
        rules=("unknown",),
        transaction=uuid.uuid4().hex,
    )


def ask(url: str, body: dict[str, str] | None = None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def until(is_so: Any) -> None:
    for _ in range(10 * LONGEST_S):
        try:
            if is_so():
                return
        except OSError:
            pass  # the server starts
        time.sleep(0.1)
    raise TimeoutError("it did not happen in time")
