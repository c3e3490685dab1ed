"""Lay out photos for the benchmark of learning: tasks, test images and classes never taught."""

from __future__ import annotations

import random
import shutil
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TASKS = 5
CLASSES_A_TASK = 5
TRAINED = 40
TESTED = 40
STRANGE_CLASSES = 20
STRANGERS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Photos:
    """Folders of the tasks, of all classes at once, of test images, of classes never taught."""

    tasks: tuple[Path, ...]
    together: Path
    test: Path
    strange: Path
    upscaled: bool


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
