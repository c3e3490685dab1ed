"""How well a growing classifier learns, beside the baselines it must hold against.

Photos of 25 classes are learnt in five tasks on top of a pre-trained backbone, and the same
classes all at once; nearest class means of the backbone's features are the least that anything
must beat. Besides: what a step costs when the older experts are frozen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.figures import Figure, at_least, at_most, print_figures
from benchmarks.learning.photos import Photos, lay_out_cifar, lay_out_photos
from benchmarks.learning.steps import measure_steps
from model_store.codec import load_network
from model_store.preprocess import normalise, read_pixels
from model_store.store.store import Store

FEATURES_BATCH = 25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument("--pretrained", required=True, type=Path, help="a ViT as safetensors")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--photos", type=Path, help="a folder of images a class, 45 or more")
    source.add_argument("--cifar", type=Path, help="cifar100.zip: train/CLASS/*.png, test/CLASS/…")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of classes and images")
    parser.add_argument(
        "--without-expert", action="store_true", help="leave out `deepen`, which takes minutes"
    )
    options = parser.parse_args()
    figures, measured = measure_steps()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ["DNE_CACHE"] = str(place / "cache")  # no token is known before its first task
        choose = random.Random(options.seed)
        photos = (
            lay_out_photos(options.photos, place, choose=choose)
            if options.photos
            else lay_out_cifar(options.cifar, place, choose=choose)
        )
        more, details = measure_learning(photos, place, pretrained=options.pretrained)
        if not options.without_expert:
            grown, costs = measure_expert(place / "grown")
            more, details = more + grown, details | costs
    figures += more
    measured |= details
    print_figures(figures, measured=measured, as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def measure_learning(
    photos: Photos, place: Path, *, pretrained: Path
) -> tuple[list[Figure], dict[str, float]]:
    strong = is_strong(pretrained)
    grown, joint = place / "grown", place / "joint"
    start = ("--pretrained", str(pretrained))
    took_s = learn_all(photos, grown, start=start)
    before_last = place / "before-last"
    shutil.copytree(grown, before_last)
    first_s = seconds_until_served(grown, photos.tasks[-1])
    again_s = seconds_until_served(before_last, photos.tasks[-1])
    train("add-task", "--data", photos.together, "--store", joint, *start)
    without: dict[str, float] = {}
    for name, memory in (("statistics", "statistics"), ("no exemplars", "0")):
        store = place / name.replace(" ", "-")
        keeps = ("--memory", memory)
        learn_all(photos, store, start=(*start, *keeps), later=keeps)
        learn(store, photos.tasks[-1], *keeps)
        without[name] = accuracy(store, photos)
    looked = ("--data", photos.test)
    ours = train("evaluate", *looked, "--store", grown, "--unknown-data", photos.strange)
    last, together = ours["accuracy"]["all"], accuracy(joint, photos)
    means = nearest_class_means(grown, photos)
    unknown = ours["unknown"]
    asked = _asked_auroc(strong=strong, upscaled=photos.upscaled)
    return [
        at_most("seconds from the command to served, 5 × 40 photos", first_s, 20),
        at_most("… again, with tokens in the cache", again_s, 6),
        at_least("points above one classifier on all classes", 100 * (last - together), -1),
        at_least("points above keeping pictures", 100 * (without["statistics"] - last), -1.5),
        at_least(
            "points above all pictures at once, without exemplars",
            100 * (without["no exemplars"] - together),
            -1,
        ),
        at_least("points ahead of nearest class means", 100 * (last - means), 0),
        at_least("AUROC of classes never taught", unknown["auroc"], asked),
        at_most("unknown images answered as known", unknown["false_accept_rate"], 0.35),
        at_most("calibration error after fitting", ours["calibration_error"], 0.03),
    ], {
        "accuracy, five tasks": last,
        "accuracy, all at once": together,
        "accuracy, nearest class means": means,
        **{f"accuracy, {name}": one for name, one in without.items()},
        "known images answered as unknown": unknown["refused_known"],
        "calibration error before fitting": ours["calibration"]["before"]["all"],
        **{f"seconds of task {number}": one for number, one in enumerate(took_s, start=1)},
    }


def is_strong(pretrained: Path) -> bool:
    """Tell the two backbones of the figures apart: a DINOv2 has LayerScale."""
    return b"ls1.gamma" in pretrained.read_bytes()[: 1 << 16]


def _asked_auroc(*, strong: bool, upscaled: bool) -> float:
    if upscaled:
        return 0.92 if strong else 0.88
    return 0.96 if strong else 0.88


def measure_expert(store: Path) -> tuple[list[Figure], dict[str, float]]:
    """Learn an expert for all tasks that have none: the gate lets it pass if it gained."""
    deeper = train("deepen", "--store", store)
    gain = 100 * (deeper["accuracy"]["all"] - deeper["accuracy"]["parent_old"])
    kept = not deeper["gate"]["passed"] or gain > 1
    return [at_least("an expert is promoted only if it gains a point", float(kept), 1)], {
        "points that an expert gains on held-out images": gain,
        "seconds of an expert": deeper["seconds"],
    }


def learn_all(
    photos: Photos, store: Path, *, start: Sequence[str], later: Sequence[str] = ()
) -> list[float]:
    """Learn all tasks but the last one."""
    took_s = []
    for number, task in enumerate(photos.tasks[:-1]):
        took_s.append(learn(store, task, *(later if number else start)))
    return took_s


def learn(store: Path, task: Path, *options: str) -> float:
    learnt = train("add-task", "--data", task, "--store", store, *options)
    print(
        f"{task.name}: {learnt['seconds']:.0f} s, held-out accuracy {learnt['accuracy']}, "
        f"promoted: {learnt['promoted']} {learnt['refused'] or ''}",
        file=sys.stderr,
    )
    if not learnt["promoted"]:  # the figures are of all tasks, whatever the gate thinks
        run("dne-store", "promote", learnt["version"], "--store", store)
    return float(learnt["seconds"])


def seconds_until_served(store: Path, task: Path) -> float:
    """Learn a task beside a server, and wait until it serves the version.

    The command may go on then: the advice on a version comes after its promotion.
    """
    port = free_port()
    program = Path(sys.executable).with_name("dne-serve")
    server = subprocess.Popen(
        [program, "--store", store, "--port", str(port), "--backend", "torch"],
        stderr=subprocess.DEVNULL,
    )
    try:
        before = wait_for(port, lambda version: version is not None)
        began_s = time.monotonic()
        with ThreadPoolExecutor(1) as beside:
            learning = beside.submit(learn_and_promote, store, task)
            wait_for(port, lambda version: version not in (None, before))
            took_s = time.monotonic() - began_s
            learning.result()
        return took_s
    finally:
        server.terminate()
        server.wait()


def learn_and_promote(store: Path, task: Path) -> None:
    learnt = train("add-task", "--data", task, "--store", store)
    if not learnt["promoted"]:
        run("dne-store", "promote", learnt["version"], "--store", store)


def wait_for(port: int, right: Callable[[int | None], bool]) -> int | None:
    """Wait until the server's version is the right one, and return it."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        try:
            with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                version: int | None = json.load(answer).get("version")
        except (OSError, ValueError):
            version = None
        if right(version):
            return version
        time.sleep(0.05)
    sys.exit("the server did not serve the version in two minutes")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def accuracy(store: Path, photos: Photos) -> float:
    return float(train("evaluate", "--data", photos.test, "--store", store)["accuracy"]["all"])


def nearest_class_means(store: Path, photos: Photos) -> float:
    """Cosine to the mean of each class, of the token that the frozen backbone alone gives."""
    opened = Store.open(str(store))
    first = opened.manifest(1)
    backbone = load_network(opened.read_shard, first)

    def features(folder: Path) -> NDArray[np.float32]:
        pixels = [
            read_pixels(path.read_bytes(), first.preprocessing) for path in sorted(folder.iterdir())
        ]
        rows = []
        with torch.inference_mode():
            for begin in range(0, len(pixels), FEATURES_BATCH):
                batch = np.stack(pixels[begin : begin + FEATURES_BATCH])
                images = torch.from_numpy(normalise(batch, first.preprocessing))
                rows.append(torch.cat(backbone.token_slices(images), dim=-1).numpy())
        found: NDArray[np.float32] = np.concatenate(rows)
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        return found

    names = sorted(path.name for path in photos.test.iterdir())
    means = np.stack([features(photos.together / name).mean(axis=0) for name in names])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    right = []
    for place, name in enumerate(names):
        right += ((features(photos.test / name) @ means.T).argmax(axis=1) == place).tolist()
    return float(np.mean(right))


def train(command: str, *arguments: object) -> dict[str, Any]:
    return run("dne-train", command, *arguments)


def run(program: str, *arguments: object) -> dict[str, Any]:
    """The JSON with which the command ended. 3, published and not promoted, is an end as well."""
    path = Path(sys.executable).with_name(program)
    done = subprocess.run(
        [path, *map(str, arguments), "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in (0, 3):
        sys.exit(f"{program} {arguments[0]} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
