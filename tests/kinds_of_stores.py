"""One store of each kind that the trainer makes, by the real commands, once a run.

Anything that reads a store may fail on one kind only: on a backbone of some family, on a version
without pictures, with groups, or with classes that were renamed or retired.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machine import alone, know_machine, run_folder
from tests.trained_store import LONGEST_S, ROOT, Commands
from tests.trainer.vit import REAL, REAL_DINOV2

SIZE = 16
TINY = ("--preset", "tiny", "--image-size", str(SIZE))
GIVEN = {"ViT-Ti": REAL, "DINOv2": REAL_DINOV2}
"""Files that are not part of the project."""
FAMILIES = (
    "timm DINOv2 with registers",
    "DINOv2 giant",
    "timm DeiT III",
    "timm DeiT distilled",
    "transformers ViT",
    "transformers DINOv2 with registers",
    "transformers CLIP",
    "timm CLIP",
    "transformers SigLIP",
    "timm SigLIP",
    "transformers DINOv3",
    "transformers DINOv3 gated",
    "timm EVA-02",
    "timm EVA-02 base",
    "timm with norms of queries and keys",
)
"""The towers of `tests.trainer.towers`, which imports torch."""


def store_of(kind: str, factory: pytest.TempPathFactory) -> Path:
    """Name the folder of a store of this kind, made when first asked for. To be read only.

    Beside it, `data` has a folder of images a class.
    """
    if kind in GIVEN and not GIVEN[kind].exists():
        pytest.skip(f"{kind.upper()} NOT TRIED: {GIVEN[kind].name} is not here")
    run = run_folder(factory)
    made = run / "kinds" / kind.replace(" ", "-")
    with alone(run / "kinds.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DNE_CACHE", str(run / "cache"))
        if not (made / "made").exists():
            know_machine()
            _make_elsewhere(kind, made, cache=run / "cache")
    return made / "models"


def _make_elsewhere(kind: str, folder: Path, *, cache: Path) -> None:
    """Make a store in a process of its own: the commands set torch to their needs."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    surroundings = {name: value for name, value in os.environ.items() if name[:4] != "DNE_"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kinds_of_stores", str(folder), kind],
        cwd=ROOT,
        env={**surroundings, "DNE_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]


# From here on in that process.


class Making:
    """The commands on the store, and the images that they are given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands = Commands(folder / "models")

    def data(self, *classes: str, seed: int = 0) -> Path:
        from tests.trainer.folders import write_classes

        write_classes(self.folder / "data", classes, size=SIZE)
        return write_classes(
            self.folder / f"task {classes[0]} {seed}", classes, size=SIZE, seed=seed
        )

    def backbone(self, *, layer_scale: bool = False) -> tuple[str, ...]:
        from tests.trainer.vit import made_up, write_vit

        tensors = made_up(image_size=SIZE, layer_scale=layer_scale)
        path = write_vit(self.folder / "vit.safetensors", tensors)
        return ("--pretrained", str(path), "--normalise", "half")

    def groups(self) -> str:
        path = self.folder / "groups.yaml"
        path.write_text("a: letter\nb: letter\n")
        return str(path)


def from_scratch(making: Making) -> None:
    making.commands.train(making.data("a", "b"), *TINY)
    making.commands.train(making.data("0", "1"))


def pretrained(making: Making) -> None:
    making.commands.train(making.data("a", "b"), *making.backbone())
    making.commands.train(making.data("0", "1"))


def layer_scale(making: Making) -> None:
    making.commands.train(making.data("a", "b"), *making.backbone(layer_scale=True))
    making.commands.train(making.data("0", "1"))


def with_experts(making: Making) -> None:
    making.commands.train(making.data("a", "b"), *making.backbone())
    making.commands.train(making.data("0", "1"), "--no-quick", "--force")
    making.commands.train(making.data("minus", "plus"), "--no-quick", "--force")


def statistics_only(making: Making) -> None:
    options = ("--memory", "statistics")
    making.commands.train(making.data("a", "b"), *making.backbone(), *options)
    making.commands.train(making.data("0", "1"), *options)


def with_groups(making: Making) -> None:
    making.commands.train(making.data("a", "b"), *making.backbone(), "--hierarchy", making.groups())
    making.commands.train(making.data("0", "1"))


def retired_and_renamed(making: Making) -> None:
    making.commands.train(making.data("a", "b"), *making.backbone())
    making.commands.train(making.data("0", "1"))
    making.commands.store("rename-class", "b", "bée")
    making.commands.store("retire-class", "1")
    data = making.folder / "data"
    (data / "b").rename(data / "bée")
    shutil.rmtree(data / "1")


def extended(making: Making) -> None:
    making.commands.train(making.data("a", "b"), *making.backbone())
    more = making.folder / "more"
    shutil.copytree(making.data("0", "1") / "0", more / "a")
    shutil.rmtree(making.folder / "data" / "0")
    shutil.rmtree(making.folder / "data" / "1")
    making.commands.train(more, "--extend", "--force")


def given(making: Making, file: Path) -> None:
    making.commands.train(making.data("a", "b"), "--pretrained", str(file))
    making.commands.train(making.data("0", "1"))


def family(making: Making, name: str) -> None:
    from tests.trainer.towers import TOWERS, write_tower

    assert tuple(TOWERS) == FAMILIES
    path = write_tower(making.folder / "tower", TOWERS[name]())
    making.commands.train(making.data("a", "b"), "--pretrained", str(path))
    making.commands.train(making.data("0", "1"), "--no-quick", "--force")


MADE: dict[str, Callable[[Making], None]] = {
    "from scratch": from_scratch,
    "pre-trained": pretrained,
    "with LayerScale": layer_scale,
    "with experts": with_experts,
    "statistics only": statistics_only,
    "with groups": with_groups,
    "retired and renamed": retired_and_renamed,
    "extended": extended,
}
KINDS = (*MADE, *GIVEN)


def make(folder: Path, kind: str) -> None:
    making = Making(folder)
    if kind in MADE:
        MADE[kind](making)
    elif kind in GIVEN:
        given(making, GIVEN[kind])
    else:
        family(making, kind)
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    (folder / "made").write_text(json.dumps(kind))


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
