"""The README's four stories, executed as they stand there.

Two things differ: the images are drawn and the pre-trained network is a tiny one of a Hub on this
machine, and the port is free.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from tests.docs.guide_blocks import Block, blocks_of
from tests.docs.reader import Reader, free_port, hub_nearby
from tests.packaging.project import ROOT

IMAGES_A_CLASS = 12
MOST_LINES = 120
CLASSES = {"animals": ("cat", "dog"), "vehicles": ("bus", "truck")}


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the stories find in the reader's folder."""
    chance = random.Random(0)
    for task, classes in CLASSES.items():
        for shade, name in enumerate(classes):
            (tmp_path / task / name).mkdir(parents=True)
            for index in range(IMAGES_A_CLASS):
                image = _drawn(task, shade, chance=chance)
                image.save(tmp_path / task / name / f"{index:03d}.jpg")
    shutil.copy(tmp_path / "animals/cat/000.jpg", tmp_path / "photo.jpg")
    return tmp_path


def _drawn(task: str, shade: int, *, chance: random.Random) -> Image.Image:
    image = Image.new("RGB", (24, 24), (40 + 160 * shade, 90, 40))
    size = chance.randint(5, 9)
    box = (12 - size, 12 - size, 12 + size, 12 + size)
    pen = ImageDraw.Draw(image)
    (pen.ellipse if task == "animals" else pen.rectangle)(box, fill=(200, 200, 240))
    return image


def story_blocks(*, port: int) -> list[Block]:
    stories = (ROOT / "README.md").read_text().partition("## Four stories")[2]
    text = stories.partition("\n## ")[0].replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    return blocks_of(text)


@pytest.fixture
def reader(folder: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    someone = Reader(folder, port=port)
    with hub_nearby(tmp_path_factory.mktemp("hub")) as environment:
        someone.environment |= environment
        yield someone
    someone.stop()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("curl") is None, reason="THE README WAS NOT EXECUTED: no curl")
def test_the_four_stories_of_the_readme_come_true(reader: Reader, port: int) -> None:
    learn, serve, predict, swap, roll_back, loop = story_blocks(port=port)
    reader.paste(learn)
    reader.paste(serve)
    answer = json.loads(reader.paste(predict))
    assert answer["version"] == 1
    assert answer["predictions"][0]["filename"] == "photo.jpg"
    assert "production (follow)" in reader.paste(swap)
    reader.wait_until_served(2)
    reader.paste(roll_back)
    reader.environment["DNE_BACKEND"] = "torch"  # a busy machine would measure engines again
    reader.paste(loop)
    assert reader.served() == 2
    log = (reader.folder / "server.log").read_text()
    link = re.search(r"^open (\S+)/label#token=(\S+)$", log, re.MULTILINE)
    assert link is not None
    jobs = urllib.request.urlopen(f"{link[1]}/jobs").read()
    assert json.loads(jobs)["refused"] is None


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES
