"""How well a growing classifier learns images that its network was not pre-trained for.

The real commands learn the classes of a domain task by task, as a user types them, and are judged
by test images of the domain: accuracy, its error of calibration, classes never taught, seconds,
and the tasks that the gate refused. The archive has DOMAIN/train/CLASS/* and DOMAIN/test/CLASS/*.
Photos are measured beside the domains: what helps there must not cost here.

With --into and --work a campaign goes on after any stop: runs that the file has are not made
again, and a run that was stopped goes on after its last whole task.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, at_least, at_most, print_figures
from model_store.store.store import Store
from model_store.worth import proposed

GAIN_OF_READING, GAIN_OF_GROWTH = 10, 25
"""The points asked above quick versions that read one block: without growth on both domains, and
with it on signs."""
GAIN, LARGE_GAIN = 2, 5
"""The points of test accuracy that a proposal has to gain, and those that have to be proposed."""
STRANGERS = 10
"""Images of each class that is never taught."""
NOT_PROMOTED = 3
MADE = "versions.json"
"""The versions of the whole tasks of a run, in its folder."""


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
class Made:
    """A version of a run, judged by the test images of the classes so far."""

    version: int
    task: int
    grown: bool
    """False: a quick version, a classifier on the network that was there."""
    promoted: bool
    """By the command itself."""
    proposed: bool
    """Whether cross-validation says that growing the network is worth its time."""
    accuracy: float
    held_out: float
    calibration: float
    auroc: float | None
    called_unknown: float
    seconds: float
    chance: float
    """The calibration error that so few images show by chance."""


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
    versions: tuple[Made, ...] = ()


def main() -> int:
    options = _options()
    runs: list[Run] = []
    for domain, archive, prefix in _asked(options):
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            name = name_of(domain, options, seed=seed)
            if options.into and name in runs_in(options.into):
                continue
            with _place(options.work, name) as place:
                laid = lay_out(domain, archive, place, prefix=prefix, seed=seed)
                start = ("--pretrained", str(options.pretrained), *options.first.split())
                later = options.later.split()
                runs.append(learn(domain, laid, place, start=start, later=later, seed=seed))
            tell(runs[-1], to=sys.stderr if options.json else sys.stdout)
            if options.into:
                add_run(options.into, name, runs[-1])
    whole = [run_of(one) for one in runs_in(options.into).values()] if options.into else runs
    figures = [*(figures_of(runs) if runs else ()), *proposal_figures(whole)]
    print_figures(figures, measured=measured_of(runs), as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def name_of(domain: Domain, options: argparse.Namespace, *, seed: int) -> str:
    """Name a run by all that it depends on."""
    tasks = "+".join(map(str, domain.tasks))
    words = [f"{domain.name} {tasks} x {domain.images}", options.pretrained.name.split(".")[0]]
    words += [options.first, options.later and f"later {options.later}", f"seed {seed}"]
    return ", ".join(word for word in words if word)


def runs_in(file: Path) -> dict[str, Any]:
    runs: dict[str, Any] = json.loads(file.read_text()).get("runs", {}) if file.exists() else {}
    return runs


def run_of(held: Mapping[str, Any]) -> Run:
    """Read a run of a file."""
    made = tuple(Made(**one) for one in held["versions"])
    return Run(**{**held, "by_task": tuple(held["by_task"]), "versions": made})


def add_run(file: Path, name: str, run: Run) -> None:
    """Add a run to a file of results, and keep what else the file holds."""
    held = json.loads(file.read_text()) if file.exists() else {}
    held["runs"] = {**held.get("runs", {}), name: asdict(run)}
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(held, indent=1) + "\n")
    fresh.replace(file)


@contextmanager
def _place(work: Path | None, name: str) -> Iterator[Path]:
    if work is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        place = work / re.sub(r"[^a-z0-9+]+", "-", name.lower())
        place.mkdir(parents=True, exist_ok=True)
        yield place


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument("--pretrained", required=True, type=Path, help="a ViT as safetensors")
    parser.add_argument("--data", type=Path, help="a zip of the domains signs and cells")
    parser.add_argument("--cifar", type=Path, help="cifar100.zip: train/CLASS/*.png, test/CLASS/…")
    parser.add_argument("--only", nargs="*", help="the domains to measure (default: all)")
    parser.add_argument("--seeds", type=int, default=1, help="draws of classes and images")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of these draws")
    parser.add_argument("--tasks", type=int, nargs="+", help="the number of classes of each task")
    parser.add_argument("--images", type=int, help="images of each class to learn from")
    parser.add_argument("--at-once", action="store_true", help="learn all classes as one task")
    parser.add_argument("--into", type=Path, help="add runs to this file; skip those it has")
    parser.add_argument("--work", type=Path, help="keep the stores here, and go on after a stop")
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
    return [
        (
            drawn(
                domain,
                tasks=(sum(domain.tasks),) if options.at_once else options.tasks,
                images=options.images,
            ),
            *where,
        )
        for domain, *where in there
    ]


def drawn(domain: Domain, *, tasks: Sequence[int] | None, images: int | None) -> Domain:
    """Exchange the tasks and the number of images of a domain. All classes as one task are the
    line above what task after task can reach."""
    return replace(domain, tasks=tuple(tasks or domain.tasks), images=images or domain.images)


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
            folder.mkdir(parents=True, exist_ok=True)
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
    folder, seen, made = place / "models", place / "seen", _made_before(place)
    seen.mkdir(exist_ok=True)
    for number, task in enumerate(laid.tasks, start=1):
        for name in task.iterdir():
            link = seen / name.name
            if not link.is_symlink():
                link.symlink_to(laid.test / name.name)
        if any(one.task == number for one in made):
            continue
        fresh, promoted = _learn_task(
            task,
            store=folder,
            options=later if number > 1 else start,
            known=[one.version for one in made],
            note=place / f"learnt-{number}.json",
        )
        store = Store.open(str(folder))
        for one in fresh:
            own = one in promoted
            made.append(
                _judge(store, one, task=number, promoted=own, seen=seen, strange=laid.strange)
            )
        _write_made(place, made)
    return _run_of(domain, made, Store.open(str(folder)), seed=seed)


def _learn_task(
    task: Path, *, store: Path, options: Sequence[str], known: Sequence[int], note: Path
) -> tuple[list[int], list[int]]:
    """Learn a task, unless the note says that it was. Return its versions, and which of them the
    command promoted."""
    if not note.exists():
        told = command("trainer", "add-task", "--data", task, *options, store=store)
        versions = Store.open(str(store))
        fresh = [version for version in versions.versions() if version not in known]
        heads = {record.target for record in versions.history("production")}
        promoted = [version for version in fresh if version in heads]
        if not promoted:
            command("model_store", "promote", told["version"], store=store)
        note.write_text(json.dumps([fresh, promoted]))
    fresh, promoted = json.loads(note.read_text())
    return fresh, promoted


def _made_before(place: Path) -> list[Made]:
    file = place / MADE
    return [Made(**one) for one in json.loads(file.read_text())] if file.exists() else []


def _write_made(place: Path, made: Sequence[Made]) -> None:
    fresh = place / f"{MADE}.new"
    fresh.write_text(json.dumps([asdict(one) for one in made]))
    fresh.replace(place / MADE)


def _judge(
    store: Store, version: int, *, task: int, promoted: bool, seen: Path, strange: Path | None
) -> Made:
    manifest = store.manifest(version)
    assert manifest.metrics.accuracy.all is not None
    unknown = ("--unknown-data", strange) if strange else ()
    asked = ("--data", seen, "--version", version, *unknown)
    judged = command("trainer", "evaluate", *asked, store=seen.parent / "models")
    run = manifest.metrics.run
    return Made(
        version=version,
        task=task,
        grown=manifest.adapted or bool(manifest.deepened),
        promoted=promoted,
        proposed=proposed(manifest) is not None,
        accuracy=100 * judged["accuracy"]["all"],
        held_out=100 * manifest.metrics.accuracy.all,
        calibration=judged["calibration_error"],
        auroc=judged["unknown"].get("auroc") if strange else None,
        called_unknown=judged["unknown"]["refused_known"],
        seconds=run.seconds if run else 0.0,
        chance=judged["calibration"]["chance"],
    )


def _run_of(domain: Domain, made: Sequence[Made], store: Store, *, seed: int) -> Run:
    """Sum up what serves after each task: the newest version that was promoted, else the newest
    quick one."""
    tasks = range(1, len(domain.tasks) + 1)
    serving = [serving_of([one for one in made if one.task == task]) for task in tasks]
    last = serving[-1]
    training = [task.training for task in store.manifest(last.version).tasks]
    return Run(
        domain=domain.name,
        seed=seed,
        accuracy=last.accuracy,
        by_task=tuple(round(one.accuracy, 1) for one in serving),
        held_out=last.held_out,
        calibration=last.calibration,
        auroc=last.auroc,
        called_unknown=last.called_unknown,
        refused=sum(not one.promoted for one in serving),
        grown=sum(one.grown and one.promoted for one in made),
        seconds=_mean([one.seconds for one in made if not one.grown]),
        growing_seconds=sum(one.seconds for one in made if one.grown),
        readout=str(training[0].get("readout", "narrow")),
        fit=" ".join(str(one.get("fit", "logistic")) for one in training),
        versions=tuple(made),
    )


def serving_of(made: Sequence[Made]) -> Made:
    """Find the version of a task that serves: the newest promoted one, else the quick one."""
    return ([one for one in made if one.promoted] or made[:1])[-1]


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


def proposal_figures(runs: Sequence[Run]) -> list[Figure]:
    """Compare what cross-validation proposed with what growing gained, wherever it was done: one
    draw for each version that was grown, promoted or not."""
    draws = [
        (quick.proposed, grown.accuracy - quick.accuracy)
        for run in runs
        for quick, grown in pairwise(run.versions)
        if grown.grown and not quick.grown and grown.task == quick.task
    ]
    gains = [gain for proposed, gain in draws if proposed]
    large = [proposed for proposed, gain in draws if gain >= LARGE_GAIN]
    figures = []
    if gains:
        name = f"share of {len(gains)} proposals that gained {GAIN} points"
        figures.append(at_least(name, _mean([gain >= GAIN for gain in gains]), 0.8))
    if large:
        name = f"share of {len(large)} gains of {LARGE_GAIN} points that were proposed"
        figures.append(at_least(name, _mean(large), 0.8))
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
