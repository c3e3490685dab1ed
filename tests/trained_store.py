"""A store that the real commands made: once a run, for all tests and all processes of it.

Versions made by hand lack most of what the trainer writes: verdicts of the gate, confusions,
calibration, thresholds, held-out images. Whatever reads a store is tried on this one too.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.machine import alone, know_machine, run_folder

ROOT = Path(__file__).resolve().parents[1]
SIZE = 16
EPOCHS = 3
LONGEST_S = 600
"""For the store to be made on a machine that has much else to do."""
PROMOTED, NOT_PROMOTED = 0, 3
QUICKLY = ("--epochs", str(EPOCHS), "--augment", "none", "--device", "cpu", "--threads", "1")
TASKS = {"letters": ("a", "b"), "digits": ("0", "1", "2"), "signs": ("minus", "plus")}
BRANCH = {"greek": ("alpha", "beta")}
RENAMED, NEW_NAME, RETIRED, EXTENDED = "b", "bumble bée", "minus", "a"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStore:
    """Numbers of versions, folders of images (one folder a class), and names of classes.

    Three tasks were learnt; a fourth with wrong labels was refused by the gate; a class was
    renamed, one extended and one retired, each in a version of its own; then came a rollback to
    the second task, a task learnt on that pinned version, and `resume`.
    """

    folder: Path
    first: int
    second: int
    third: int
    refused: int
    renaming: int
    extension: int
    retirement: int
    branch: int

    @property
    def location(self) -> Path:
        return self.folder / "models"

    @property
    def pretrained(self) -> Path:
        """Another store: two tasks on top of a pre-trained vision transformer."""
        return self.folder / "pretrained"

    @property
    def served(self) -> int:
        """The version that channel production names."""
        return self.retirement

    @property
    def versions(self) -> tuple[int, ...]:
        """All of them, oldest first."""
        lineage = (self.first, self.second, self.third, self.refused)
        return (*lineage, self.renaming, self.extension, self.retirement, self.branch)

    @property
    def pretrained_versions(self) -> tuple[int, ...]:
        return (1, 2)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that the served version answers."""
        learnt = (name for task in TASKS.values() for name in task)
        return tuple(NEW_NAME if name == RENAMED else name for name in learnt if name != RETIRED)

    def data(self, task: str) -> Path:
        """The images that a task was learnt from: letters, digits, signs, greek, wrong."""
        return self.folder / "data" / task

    def image(self, class_name: str) -> bytes:
        """An image of a class as the commands were given it; its first name counts."""
        found = sorted((self.folder / "data").glob(f"*/{class_name}/*.png"))
        return found[0].read_bytes()


def allow_for_the_making(items: list[pytest.Item]) -> None:
    """Whichever test is the first to need the store waits until it is made."""
    for item in items:
        needed: Sequence[str] = getattr(item, "fixturenames", ())
        if "trained_store" in needed and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONGEST_S))


@pytest.fixture(scope="session")
def trained_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedStore]:
    """To be read only: a test that writes asks for `trained_copy`."""
    run = run_folder(tmp_path_factory)
    with alone(run / "trained.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DNE_CACHE", str(run / "cache"))
        if not _record(run / "trained").exists():
            know_machine()
            _make_elsewhere(run / "trained", cache=run / "cache")
    made = TrainedStore(folder=run / "trained", **json.loads(_record(run / "trained").read_text()))
    before = _files(made)
    yield made
    assert _files(made) == before, "a test has changed the store that all tests share"


@pytest.fixture
def trained_copy(trained_store: TrainedStore, tmp_path: Path) -> TrainedStore:
    """The same store and images, for one test: it may change them."""
    copied = tmp_path / "trained"
    shutil.copytree(trained_store.folder, copied)
    return TrainedStore(folder=copied, **json.loads(_record(copied).read_text()))


def _record(folder: Path) -> Path:
    return folder / "made.json"


def _files(made: TrainedStore) -> dict[str, int]:
    """Every object of both stores, with its size."""
    found = (path for store in (made.location, made.pretrained) for path in store.rglob("*"))
    kept = (path for path in found if path.is_file() and path.parent.name != "tmp")
    return {str(path.relative_to(made.folder)): path.stat().st_size for path in kept}


def _make_elsewhere(folder: Path, *, cache: Path) -> None:
    """In a process of its own: the commands set torch and the environment to their needs. The
    cache is the run's own, because finding out what a machine can do takes ten seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    surroundings = {name: value for name, value in os.environ.items() if name[:4] != "DNE_"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.trained_store", str(folder)],
        cwd=ROOT,
        env={**surroundings, "DNE_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]


# From here on in that process. It alone needs the trainer: pytest's own start does without torch.


class Commands:
    """`dne-train` and `dne-store` on one store, through their entry points."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def train(self, data: Path, *options: str, ends: int = PROMOTED) -> int:
        """The number of the version that was published."""
        from trainer.cli import main

        checkpoint = self._store.with_name("checkpoint")
        given = ("add-task", "--data", str(data), *QUICKLY, "--checkpoint", str(checkpoint))
        return int(self._call(main, [*given, *options], ends)["version"])

    def store(self, *arguments: str) -> dict[str, Any]:
        from model_store.cli.main import main

        return self._call(main, arguments, PROMOTED)

    def _call(self, main: Any, arguments: Sequence[str], ends: int) -> dict[str, Any]:
        with redirect_stdout(io.StringIO()) as printed:
            code = main([*arguments, "--json", "--store", str(self._store)])
        assert code == ends, f"{' '.join(arguments)} ended with {code}: {printed.getvalue()}"
        result: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
        return result


def make(folder: Path) -> None:
    write_data(folder / "data")
    numbers = make_store(folder)
    make_pretrained_store(folder)
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    _record(folder).write_text(json.dumps(numbers))


def make_store(folder: Path) -> dict[str, int]:
    commands, data = Commands(folder / "models"), folder / "data"
    first = commands.train(data / "letters", "--preset", "tiny")
    second = commands.train(data / "digits")
    third = commands.train(data / "signs")
    refused = commands.train(data / "wrong", "--min-new", "100%", ends=NOT_PROMOTED)
    renaming = commands.store("rename-class", RENAMED, NEW_NAME)["version"]
    extension = commands.train(data / "more", "--extend")
    retirement = commands.store("retire-class", RETIRED)["version"]
    commands.store("rollback", "--to", str(second), "--reason", "trying what was before")
    branch = commands.train(data / "greek", ends=NOT_PROMOTED)
    commands.store("resume")
    return {
        "first": first,
        "second": second,
        "third": third,
        "refused": refused,
        "renaming": renaming,
        "extension": extension,
        "retirement": retirement,
        "branch": branch,
    }


def make_pretrained_store(folder: Path) -> None:
    from tests.trainer.vit import made_up, write_vit

    vit = write_vit(folder / "vit.safetensors", made_up(image_size=SIZE))
    commands, data = Commands(folder / "pretrained"), folder / "data"
    commands.train(data / "letters", "--pretrained", str(vit), "--normalise", "imagenet")
    commands.train(data / "digits")


def write_data(folder: Path) -> None:
    from tests.trainer.folders import write_classes

    for name, classes in {**TASKS, **BRANCH}.items():
        write_classes(folder / name, classes, size=SIZE)
    write_classes(folder / "more", [EXTENDED], size=SIZE, seed=9)
    write_wrong_labels(folder / "wrong", ["left", "right"], images=60)


def write_wrong_labels(folder: Path, classes: Sequence[str], *, images: int) -> None:
    """Images of one kind in all folders. Enough of them that the gate has some to judge by."""
    from tests.trainer.folders import pixels_of

    pixels = iter(pixels_of("anything", images * len(classes), size=SIZE))
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(images):
            Image.fromarray(np.asarray(next(pixels))).save(folder / name / f"{index:03}.png")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
