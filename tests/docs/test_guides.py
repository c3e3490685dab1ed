"""The guides, executed as they stand there: every block of shell and Python, in order.

Two things differ: photos are drawn and the pre-trained network is a tiny one of a Hub on this
machine, and the port is free. The
stores that guides begin with are made by the real commands.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from model_store.store.store import Store
from tests.docs.custom_vision import custom_vision
from tests.docs.guide_blocks import GUIDES, guide
from tests.docs.reader import Reader, free_port, hub_nearby
from tests.docs.reader_folder import PRETRAINED, TASKS, write_folder

DIGITS = tuple(f"digit {digit}" for digit in range(8))
ANIMALS, VEHICLES, PLANTS = TASKS["animals"], TASKS["vehicles"], TASKS["plants"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Where a guide begins and ends."""

    begins: int = 0
    """The versions in the store at the beginning: animals, vehicles, signs."""
    ends: tuple[str, ...]
    """The classes that the channel's version knows at the end."""
    files: tuple[str, ...] = ()
    """Files that the reader has then."""


STORIES = {
    "first-steps": Story(ends=DIGITS),
    "your-photos": Story(ends=(*ANIMALS, *VEHICLES), files=("answers.csv",)),
    "adding-tasks": Story(begins=1, ends=(*ANIMALS, *VEHICLES, *PLANTS)),
    "report": Story(begins=2, ends=(*ANIMALS, *VEHICLES), files=("report-2/report.html",)),
    "rolling-back": Story(begins=3, ends=(*ANIMALS, *VEHICLES, *PLANTS)),
    "production": Story(begins=2, ends=(*ANIMALS, *VEHICLES), files=("tokens", "backup")),
    "many-models": Story(
        begins=2, ends=(*ANIMALS, *VEHICLES), files=("company", "limits", "tokens")
    ),
    "calling": Story(begins=2, ends=(*ANIMALS, *VEHICLES), files=("openapi.json", "answers.jsonl")),
    "coming-from": Story(ends=(*ANIMALS, *VEHICLES), files=("from-roboflow", "from-teachable")),
}
WITHOUT_PROGRAMS = {"how-it-works"}


def dne_train(*words: str, folder: Path) -> None:
    command = [sys.executable, "-m", "trainer", "add-task", *words]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Stores with one, two and three versions, each a copy of the one before and a task more."""
    folder = tmp_path_factory.mktemp("stores")
    write_folder(folder)
    made = []
    for task, options in {
        "animals": ("--pretrained", PRETRAINED),
        "vehicles": (),
        "signs": (),
    }.items():
        dne_train("--data", task, *options, folder=folder)
        made.append(folder / f"with-{task}")
        shutil.copytree(folder / "models", made[-1])
    return made


@pytest.fixture
def reader(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    write_folder(tmp_path)
    someone = Reader(tmp_path, port=free_port())
    # A busy machine would measure engines for long, at every start of a server.
    someone.environment |= {"DNE_BACKEND": "torch", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with hub_nearby(tmp_path_factory.mktemp("hub")) as environment:
        someone.environment |= environment
        yield someone
    someone.stop()


def tagged_photos(folder: Path) -> list[tuple[str, Path]]:
    """List photos with the tags that a project of Custom Vision would give them."""
    tagged = [
        (name, folder / task / name) for task in ("animals", "vehicles") for name in TASKS[task]
    ]
    tagged.append(("Negative", folder / "holiday"))
    return [(tag, photo) for tag, place in tagged for photo in sorted(place.iterdir())]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    shutil.which("curl") is None or shutil.which("unzip") is None,
    reason="THE GUIDES WERE NOT EXECUTED: no curl or no unzip",
)
@pytest.mark.parametrize("name", STORIES)
def test_a_guide_comes_true(name: str, reader: Reader, stores: list[Path]) -> None:
    story, port = STORIES[name], int(reader.environment["DNE_PORT"])
    if story.begins:
        shutil.copytree(stores[story.begins - 1], reader.folder / "models")
    with custom_vision(tagged_photos(reader.folder)) as environment:
        reader.environment |= environment
        for block in guide(GUIDES[name], port=port):
            if block.reason is None:
                reader.paste(block)
    store = Store.open(str(reader.folder / "models"))
    head = store.head("production")
    assert head is not None
    assert set(story.ends) <= set(store.manifest(head.target).classes)
    assert [one for one in story.files if not (reader.folder / one).exists()] == []
