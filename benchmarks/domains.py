"""How well a growing classifier learns images that its network was not pre-trained for.

The real commands learn the classes of a domain task by task, as a user types them, and are judged
by test images of the domain: accuracy, its error of calibration, classes never taught, seconds,
and the tasks that the gate refused. The archive has DOMAIN/train/CLASS/* and DOMAIN/test/CLASS/*.
Photos are measured beside the domains: what helps there must not cost here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, at_least, at_most, print_figures
from model_store.store.store import Store

GAIN_OF_READING, GAIN_OF_GROWTH = 10, 25
"""The points asked above quick versions that read one block: without growth on both domains, and
with it on signs."""
STRANGERS = 10
"""Images of each class that is never taught."""
NOT_PROMOTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A domain: how many classes each task has, how many images a class, and what is asked."""

    name: str
    tasks: tuple[int, ...]
    images: int
    tested: int
    before: float = 0.0
    """The last accuracy of quick versions that read one block, in per cent; 0: not known."""


SIGNS = Domain(name="signs", tasks=(5, 5, 5, 5), images=40, tested=30, before=59.3)
CELLS = Domain(name="cells", tasks=(4, 4, 3), images=60, tested=40, before=76.8)
PHOTOS = Domain(name="photos", tasks=(5, 5, 5, 5), images=40, tested=40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """Folders of the tasks, of test images of all their classes, and of classes never taught."""

    tasks: tuple[Path, ...]
    test: Path
    strange: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The outcome of one domain on one network."""

    domain: str
    seed: int
    accuracy: float
    by_task: tuple[float, ...]
    """The accuracy after each task, of the classes so far."""
    held_out: float
    """The accuracy by the images that the last run held out."""
    calibration: float
    auroc: float | None
    called_unknown: float
    """The share of test images of known classes that are called unknown."""
    refused: int
    """Tasks of which no version was promoted."""
    grown: int
    """Promoted versions that were grown after a quick one."""
    seconds: float
    """Of a quick version; the mean over tasks."""
    growing_seconds: float
    """Of all versions that were grown, promoted or not."""
    readout: str
    fit: str


def main() -> int:
    options = _options()
    runs: list[Run] = []
    for domain, archive, prefix in _asked(options):
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder)
                laid = lay_out(domain, archive, place, prefix=prefix, seed=seed)
                start = ("--pretrained", str(options.pretrained), *options.first.split())
                later = options.later.split()
                runs.append(learn(domain, laid, place, start=start, later=later, seed=seed))
                tell(runs[-1], to=sys.stderr if options.json else sys.stdout)
    print_figures(figures_of(runs), measured=measured_of(runs), as_json=options.json)
    return 0 if all(figure.reached for figure in figures_of(runs)) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument("--pretrained", required=True, type=Path, help="a ViT as safetensors")
    parser.add_argument("--data", type=Path, help="a zip of the domains signs and cells")
    parser.add_argument("--cifar", type=Path, help="cifar100.zip: train/CLASS/*.png, test/CLASS/…")
    parser.add_argument("--only", nargs="*", help="the domains to measure (default: all)")
    parser.add_argument("--seeds", type=int, default=1, help="draws of classes and images")
    parser.add_argument("--at-once", action="store_true", help="learn all classes as one task")
    parser.add_argument("--first", default="", help="more options of the first add-task")
    parser.add_argument("--later", default="", help="more options of all other add-task")
    return parser.parse_args()


def _asked(options: argparse.Namespace) -> list[tuple[Domain, Path, str]]:
    there = []
    if options.data is not None:
        there += [(SIGNS, options.data, "signs/"), (CELLS, options.data, "cells/")]
    if options.cifar is not None:
        there.append((PHOTOS, options.cifar, ""))
    there = [one for one in there if not options.only or one[0].name in options.only]
    return [(at_once(one) if options.at_once else one, *where) for one, *where in there]


def at_once(domain: Domain) -> Domain:
    """Join all tasks: the line above what task after task can reach."""
    return replace(domain, tasks=(sum(domain.tasks),))


def lay_out(domain: Domain, archive: Path, place: Path, *, prefix: str, seed: int) -> Laid:
    """Write the images of a draw of classes into folders."""
    choose = random.Random(seed)
    with zipfile.ZipFile(archive) as images:
        names: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in sorted(images.namelist()):
            parts = name.removeprefix(prefix).split("/")
            if name.startswith(prefix) and len(parts) == 3 and parts[2]:
                names[parts[0], parts[1]].append(name)
        classes = sorted({name for part, name in names if part == "train"})
        choose.shuffle(classes)
        taught, tasks = sum(domain.tasks), []

        def write(part: str, one: str, *, into: Path, most: int) -> None:
            folder = into / one
            folder.mkdir(parents=True)
            for name in choose.sample(names[part, one], min(most, len(names[part, one]))):
                (folder / name.split("/")[-1]).write_bytes(images.read(name))

        for number, count in enumerate(domain.tasks, start=1):
            begin = sum(domain.tasks[: number - 1])
            tasks.append(place / f"task-{number}")
            for one in classes[begin : begin + count]:
                write("train", one, into=tasks[-1], most=domain.images)
                write("test", one, into=place / "test", most=domain.tested)
        for one in classes[taught:]:
            write("test", one, into=place / "strange", most=STRANGERS)
    strange = place / "strange" if len(classes) > taught else None
    return Laid(tasks=tuple(tasks), test=place / "test", strange=strange)


def learn(
    domain: Domain,
    laid: Laid,
    place: Path,
    *,
    start: Sequence[str],
    later: Sequence[str] = (),
    seed: int = 0,
) -> Run:
    """Learn one task after the other. A version that the gate refuses is promoted all the same."""
    store, found = place / "models", list[Mapping[str, Any]]()
    seen = place / "seen"
    seen.mkdir()
    accuracies = []
    for number, task in enumerate(laid.tasks):
        options = later if number else start
        found.append(command("trainer", "add-task", "--data", task, *options, store=store))
        if not served(found[-1]):
            command("model_store", "promote", found[-1]["version"], store=store)
        for folder in task.iterdir():
            (seen / folder.name).symlink_to(laid.test / folder.name)
        last = number == len(laid.tasks) - 1
        strange = ("--unknown-data", laid.strange) if last and laid.strange else ()
        judged = command("trainer", "evaluate", "--data", seen, *strange, store=store)
        accuracies.append(judged["accuracy"]["all"])
    serving = served(found[-1]) or found[-1]
    manifest = Store.open(str(store)).manifest(serving["version"])
    training = [task.training for task in manifest.tasks]
    grown = [one["deeper"] for one in found if one["deeper"]]
    return Run(
        domain=domain.name,
        seed=seed,
        accuracy=100 * accuracies[-1],
        by_task=tuple(round(100 * one, 1) for one in accuracies),
        held_out=100 * serving["accuracy"]["all"],
        calibration=judged["calibration_error"],
        auroc=judged["unknown"].get("auroc") if laid.strange else None,
        called_unknown=judged["unknown"]["refused_known"],
        refused=sum(served(one) is None for one in found),
        grown=sum(one["promoted"] for one in grown),
        seconds=_mean([one["seconds"] for one in found]),
        growing_seconds=sum(one["seconds"] for one in grown),
        readout=str(training[0].get("readout", "narrow")),
        fit=" ".join(str(one.get("fit", "logistic")) for one in training),
    )


def served(told: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Find the version of a task that is promoted: the grown one before the quick one."""
    both = (told["deeper"], told)
    return next((one for one in both if one and one["promoted"]), None)


def command(module: str, name: str, *arguments: object, store: Path) -> dict[str, Any]:
    """Run a command of the product, and read the object that it ends with."""
    done = subprocess.run(
        [sys.executable, "-m", module, name, *map(str, arguments), "--store", store, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "DNE_CACHE": str(store.parent / "cache")},
    )
    if done.returncode not in (0, NOT_PROMOTED):
        raise SystemExit(f"{module} {name} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found.get("refused"):
        print(f"not promoted: {found['refused']}", file=sys.stderr)
    return found


def tell(run: Run, *, to: Any) -> None:
    auroc = "–" if run.auroc is None else f"{run.auroc:.3f}"
    print(
        f"{run.domain} seed {run.seed}: {run.accuracy:.1f} % ({', '.join(map(str, run.by_task))}), "
        f"held-out {run.held_out:.1f} %, calibration {run.calibration:.3f}, AUROC {auroc}, "
        f"{run.called_unknown:.1%} of known images called unknown, {run.refused} refused, "
        f"{run.seconds:.1f} s a task, {run.grown} grown in {run.growing_seconds:.0f} s, "
        f"{run.readout}, {run.fit}",
        file=to,
        flush=True,
    )


def figures_of(runs: Sequence[Run]) -> list[Figure]:
    """Compare the means over draws with what is asked."""
    grown = any(run.grown for run in runs)
    asked = {SIGNS: GAIN_OF_GROWTH} if grown else {SIGNS: GAIN_OF_READING, CELLS: GAIN_OF_READING}
    before = {one.name: one.before for one in asked}
    gains = [run.accuracy - before[run.domain] for run in runs if run.domain in before]
    figures = []
    if gains:
        name = f"{' and '.join(before)}: points above quick versions of one block"
        figures.append(at_least(name, _mean(gains), asked[SIGNS]))
    figures += [
        at_most("tasks refused by the gate", sum(run.refused for run in runs), 0),
        at_most("largest calibration error", max(run.calibration for run in runs), 0.04),
    ]
    return figures


def measured_of(runs: Sequence[Run]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in dict.fromkeys(run.domain for run in runs):
        own = [run for run in runs if run.domain == name]
        found |= {
            f"{name}: accuracy, %": _mean([run.accuracy for run in own]),
            f"{name}: accuracy of held-out images, %": _mean([run.held_out for run in own]),
            f"{name}: seconds a task": _mean([run.seconds for run in own]),
            f"{name}: calibration error": _mean([run.calibration for run in own]),
            f"{name}: known images called unknown": _mean([run.called_unknown for run in own]),
            f"{name}: versions grown": _mean([float(run.grown) for run in own]),
            f"{name}: seconds of growing": _mean([run.growing_seconds for run in own]),
        }
        scores = [run.auroc for run in own if run.auroc is not None]
        if scores:
            found[f"{name}: AUROC of classes never taught"] = _mean(scores)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
