"""Write the demo's image folders: scikit-learn's 1,797 handwritten digits, and drawn shapes.

The shapes are for a fourth task. Every third image is held out and never shown to the trainer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw
from sklearn.datasets import load_digits

DIGIT_TASKS = {"digits-0-4": range(5), "digits-5-6": range(5, 7), "digits-7-9": range(7, 10)}
SHAPES = ("cross", "triangle")
_SHAPES_EACH = 180
SIDE = 8  # pixels of a digit
_DRAWN_SIDE = 64  # shapes are drawn large, then shrunk: the grey edges look like the digits' ones


@dataclass(frozen=True, slots=True)
class DemoData:
    """`train/<task>/<class>/*.png` and `test/<class>/*.png` of the digits; the shapes apart."""

    root: Path

    def train(self, task: str) -> Path:
        return self.root / "train" / task

    @property
    def test(self) -> Path:
        return self.root / "test"

    @property
    def shapes_train(self) -> Path:
        return self.root / "train" / "shapes"

    @property
    def shapes_test(self) -> Path:
        return self.root / "test-shapes"

    def test_images(self, digits: range = range(10)) -> list[Path]:
        return [image for digit in digits for image in images_in(self.test / f"digit_{digit}")]


def images_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.png"))


def write_demo_data(root: Path) -> DemoData:
    data, digits, chance = DemoData(root), load_digits(), random.Random(0)
    task_of = {digit: task for task, members in DIGIT_TASKS.items() for digit in members}
    for index, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = data.test if index % 3 == 0 else data.train(task_of[int(digit)])
        image = Image.fromarray((pixels * 15.9).astype("uint8"))  # 0 to 16 becomes 0 to 254
        _save(image, folder / f"digit_{digit}", index)
    for shape in SHAPES:
        for index in range(_SHAPES_EACH):
            folder = data.shapes_test if index % 3 == 0 else data.shapes_train
            _save(_draw(shape, chance=chance), folder / shape, index)
    return data


def _draw(shape: str, *, chance: random.Random) -> Image.Image:
    """One shape, a little different each time in place, size, ink and slant."""
    image = Image.new("L", (_DRAWN_SIDE, _DRAWN_SIDE))
    pen = ImageDraw.Draw(image)
    ink = chance.randint(180, 255)
    reach = chance.randint(20, 30)
    middle = _DRAWN_SIDE // 2
    x, y = (middle + chance.randint(-3, 3) for _ in range(2))
    if shape == "cross":
        thick = chance.randint(7, 13)
        pen.line((x - reach, y, x + reach, y), fill=ink, width=thick)
        pen.line((x, y - reach, x, y + reach), fill=ink, width=thick)
    else:
        pen.polygon((x, y - reach, x - reach, y + reach, x + reach, y + reach), fill=ink)
    slanted = image.rotate(chance.uniform(-12, 12), resample=Image.Resampling.BILINEAR)
    return slanted.resize((SIDE, SIDE), Image.Resampling.BOX)


def _save(image: Image.Image, folder: Path, index: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    image.save(folder / f"{index:04d}.png")
