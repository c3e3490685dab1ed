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
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.figures import Figure, at_least, at_most, print_figures
from model_store.codec import load_network
from model_store.inference.forward import Lineage
from model_store.network.network import Network
from model_store.preprocess import normalise, read_pixels
from model_store.spec import ExpertSpec, TaskSpec
from model_store.store.store import Store
from trainer.learning.fit import parameter_groups
from trainer.learning.losses import Objective, Teacher, cross_entropy
from trainer.presets import NetworkShape

TASKS = 5
CLASSES_A_TASK = 5
TRAINED = 40
TESTED = 40
STRANGE_CLASSES = 20
STRANGERS = 10
STEP_BATCH = 32
FEATURES_BATCH = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Photos:
    """Folders of the tasks, of all classes at once, of test images, of classes never taught."""

    tasks: tuple[Path, ...]
    together: Path
    test: Path
    strange: Path
    upscaled: bool


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


# Photos


def lay_out_cifar(archive: Path, place: Path, *, choose: random.Random) -> Photos:
    with zipfile.ZipFile(archive) as images:
        names: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in images.namelist():
            parts = name.split("/")
            if len(parts) == 3 and parts[2].endswith(".png"):
                names[parts[0], parts[1]].append(name)
        classes = sorted({name for part, name in names if part == "train"})
        return _lay_out(
            classes,
            place,
            choose=choose,
            trained=lambda one: choose.sample(sorted(names["train", one]), TRAINED),
            tested=lambda one: choose.sample(sorted(names["test", one]), TESTED),
            write=lambda name, path: path.write_bytes(images.read(name)),
            upscaled=True,
        )


def lay_out_photos(folder: Path, place: Path, *, choose: random.Random) -> Photos:
    drawn = {
        path.name: choose.sample(found, min(len(found), TRAINED + TESTED))
        for path in sorted(folder.iterdir())
        if path.is_dir() and len(found := sorted(one for one in path.iterdir() if one.is_file()))
    }
    enough = [name for name, found in drawn.items() if len(found) >= TRAINED + 5]
    return _lay_out(
        enough,
        place,
        choose=choose,
        trained=lambda one: [str(path) for path in drawn[one][:TRAINED]],
        tested=lambda one: [str(path) for path in drawn[one][TRAINED:]],
        write=lambda name, path: shutil.copyfile(name, path),
        upscaled=False,
    )


def _lay_out(
    classes: Sequence[str],
    place: Path,
    *,
    choose: random.Random,
    trained: Callable[[str], list[str]],
    tested: Callable[[str], list[str]],
    write: Callable[[str, Path], object],
    upscaled: bool,
) -> Photos:
    taught = TASKS * CLASSES_A_TASK
    if len(classes) < taught + 1:
        sys.exit(f"{len(classes)} classes with enough images are too few: {taught} and one more")
    chosen = choose.sample(list(classes), min(len(classes), taught + STRANGE_CLASSES))

    def put(names: Iterable[str], folder: Path) -> None:
        folder.mkdir(parents=True)
        for number, name in enumerate(names):
            write(name, folder / f"{number:04d}{Path(name).suffix}")

    tasks = []
    for task in range(TASKS):
        tasks.append(place / f"task-{task + 1}")
        for one in chosen[task * CLASSES_A_TASK : (task + 1) * CLASSES_A_TASK]:
            images = trained(one)
            put(images, tasks[-1] / one)
            put(images, place / "together" / one)
            put(tested(one), place / "test" / one)
    for one in chosen[taught:]:
        put(tested(one)[:STRANGERS], place / "strange" / one)
    return Photos(
        tasks=tuple(tasks),
        together=place / "together",
        test=place / "test",
        strange=place / "strange",
        upscaled=upscaled,
    )


# Learning


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


# Steps


def measure_steps(rounds: int = 7) -> tuple[list[Figure], dict[str, float]]:
    """A step for task 6 of the `paper` preset, one thread, processor time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    network, teacher = _grown_network(tasks=6)
    took_ms: dict[str, list[float]] = {"older experts frozen": [], "all experts train": []}
    for number in range(rounds + 1):
        for name in took_ms:
            spent_ms = _time_step(network, teacher, everything=name == "all experts train")
            if number:  # the first one warms up
                took_ms[name].append(spent_ms)
    torch.set_num_threads(threads)
    medians = {name: statistics.median(times) for name, times in took_ms.items()}
    ratio = medians["older experts frozen"] / medians["all experts train"]
    return [at_most("a step for task 6, in steps where all experts train", ratio, 0.5)], {
        f"ms of a step, {name}": value for name, value in medians.items()
    }


def _grown_network(*, tasks: int) -> tuple[Network, Teacher]:
    """After its last expansion, and the parent's classifier from before it."""
    torch.manual_seed(0)
    shape = NetworkShape(preset="paper")
    network = Network(shape.first_network())
    for index in range(tasks):
        teacher = Teacher(heads=network.heads, classes=len(network.spec.classes))
        heads = shape.heads_of_later(images=0) if index else shape.heads_of_first()
        classes = tuple(f"class {index}.{number}" for number in range(10))
        network.expand(
            TaskSpec(name=f"task {index}", classes=classes, expert=ExpertSpec(heads=heads))
        )
    return network, teacher


def _time_step(network: Network, teacher: Teacher, *, everything: bool) -> float:
    """The trainer's own objective and optimiser; only what learns differs."""
    *older, _ = network.experts
    for expert in older:
        expert.requires_grad_(everything)
    parameters = list(network.parameters()) if everything else network.learnable()
    size = network.spec.image_size
    images = torch.randn(STEP_BATCH, 3, size, size)
    labels = torch.randint(len(network.spec.classes), (STEP_BATCH,))
    objective = Objective(
        classification=cross_entropy,
        teacher=teacher,
        auxiliary=network.auxiliary_head(),
        frozen=None if everything else Lineage.of(network, experts=len(older)),
    )
    optimiser = torch.optim.AdamW(parameter_groups(network, parameters), lr=1e-6, fused=True)
    began_s = time.process_time()
    step = objective(network, images, labels)
    step.loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    spent_s = time.process_time() - began_s
    network.zero_grad(set_to_none=True)
    return 1000 * spent_s


if __name__ == "__main__":
    sys.exit(main())
