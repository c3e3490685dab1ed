"""Make the folder that the guides speak of: drawn photos, a tiny pre-trained file, zips."""

from __future__ import annotations

import random
import shutil
import zipfile
from pathlib import Path

from PIL import Image, ImageDraw

from tests.trainer.vit import write_vit

IMAGES_A_CLASS = 14
TASKS = {
    "animals": ("cat", "dog"),
    "vehicles": ("bus", "truck"),
    "plants": ("rose", "tulip"),
    "signs": ("stop", "yield"),
}
COLOURS = {
    "cat": (200, 120, 40), "dog": (70, 50, 30), "bus": (220, 40, 40), "truck": (40, 60, 200),
    "rose": (230, 60, 140), "tulip": (240, 210, 60), "stop": (180, 0, 0), "yield": (250, 250, 250),
    "other": (20, 160, 90),
}  # fmt: skip
PRETRAINED = "vit_tiny_patch16_224.safetensors"


def write_folder(folder: Path) -> None:
    """Write all that a guide finds in the reader's folder, but no store."""
    for task, classes in TASKS.items():
        for name in classes:
            write_photos(folder / task / name, like=name)
    write_photos(folder / "holiday", like="other")
    for name in ("cat", "bus"):
        write_photos(folder / "more-photos" / name, like=name, seed=1)
    for name in TASKS["animals"]:
        write_photos(folder / "photos-to-judge-by" / name, like=name, seed=2)
        with zipfile.ZipFile(folder / f"{name}-samples.zip", "w") as archive:
            for photo in sorted((folder / "animals" / name).iterdir()):
                archive.write(photo, photo.name)
    _write_roboflow(folder / "roboflow.zip", photos=folder / "animals")
    shutil.copy(folder / "animals/cat/000.jpg", folder / "photo.jpg")
    write_vit(folder / PRETRAINED)


def write_photos(folder: Path, *, like: str, seed: int = 0) -> None:
    chance = random.Random(f"{like} {seed}")
    folder.mkdir(parents=True)
    for index in range(IMAGES_A_CLASS):
        _drawn(like, chance=chance).save(folder / f"{index:03d}.jpg")


def _drawn(like: str, *, chance: random.Random) -> Image.Image:
    """Draw a disc in the colour of its class, never twice in the same way."""
    image = Image.new("RGB", (24, 24), tuple(chance.randint(90, 130) for _ in range(3)))
    reach, x, y = chance.randint(6, 10), chance.randint(9, 15), chance.randint(9, 15)
    colour = tuple(max(0, min(255, part + chance.randint(-15, 15))) for part in COLOURS[like])
    ImageDraw.Draw(image).ellipse((x - reach, y - reach, x + reach, y + reach), fill=colour)
    return image


def _write_roboflow(path: Path, *, photos: Path) -> None:
    """Write a classification export of Roboflow: a folder a class in each of three parts."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("README.roboflow.txt", "exported")
        for name in TASKS["animals"]:
            for index, photo in enumerate(sorted((photos / name).iterdir())):
                part = ("train", "train", "train", "valid", "test")[index % 5]
                archive.write(photo, f"{part}/{name}/{photo.name}")
