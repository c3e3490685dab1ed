"""Make a set of six classes of stripes, and teach methods three tasks of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.cell import Cell, Run, preprocessing_of
from lab.dataset import Dataset
from lab.method import Lesson, Method
from lab.presets import PRESETS, Preset
from lab.protocol import make_protocol
from lab.registry import read_choice
from tests.lab.breaking import Broken, Silent
from trainer.data.folders import LabelledImages, join
from trainer.progress import Progress

PRESET = replace(
    PRESETS["mini"],
    image_size=16,
    images=24,
    memory=48,
    resnet_width=8,
    first_epochs=6,
    epochs=6,
    tuning_epochs=3,
    batch_size=16,
    resnet_rate=0.05,
)
SHORT = replace(PRESET, classes=4, first_epochs=1, epochs=2, tuning_epochs=2)
"""Two tasks and few epochs, for runs that need not learn much."""
COLOURS = ((230, 60, 60), (60, 220, 60), (60, 60, 230))


def striped() -> Dataset:
    """Draw images of three colours, with stripes across or along."""
    return Dataset(train=stripes(24, seed=0), test=stripes(6, seed=1), digest="striped")


def stripes(count: int, *, seed: int) -> LabelledImages:
    draw, side = np.random.default_rng(seed), PRESET.image_size
    pixels = []
    for label in range(6):
        line = np.where(np.arange(side) % 4 < 2, 1.0, 0.3)
        stripes = np.tile(line, (side, 1)) if label % 2 else np.tile(line[:, None], (1, side))
        noise = draw.normal(0, 20, (count, side, side, 3))
        pixels.append(stripes[:, :, None] * np.array(COLOURS[label // 2]) + noise)
    return LabelledImages(
        classes=tuple("abcdef"),
        pixels_NHWC=np.concatenate(pixels).clip(0, 255).astype(np.uint8),
        labels_N=np.repeat(np.arange(6), count),
    )


def run_of(
    method: str, folder: Path, *, preset: Preset = PRESET, progress: Progress | None = None
) -> Run:
    cell = Cell(
        choice=read_choice(method), preset_name="striped", setting="", preset=preset, seed=0
    )
    return Run(
        cell, striped(), out=folder / "out.jsonl", progress=progress or Silent(), folder=folder
    )


def assert_a_killed_run_goes_on(method: str, folder: Path, *, phases: tuple[str, str]) -> None:
    """Kill a run in the second epoch of each phase of its second task; compare all bits."""
    whole = run_of(method, folder / "whole", preset=SHORT)
    whole.go()
    for phase in phases:
        breaks = Silent(breaks_in=phase, on_task=2)
        with pytest.raises(Broken):
            run_of(method, folder / "cut", preset=SHORT, progress=breaks).go()
    cut = run_of(method, folder / "cut", preset=SHORT)
    cut.go()
    assert cut.lines[1].resumed
    assert equal(state_of(cut.method), state_of(whole.method))


def state_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in module.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@dataclass(frozen=True, slots=True, kw_only=True)
class School:
    """Teach a method task by task, with the first four images of each old class."""

    preset: Preset = PRESET

    def lesson(self, task: int) -> Lesson:
        protocol = make_protocol(striped(), self.preset, seed=0)
        classes = protocol.classes_until(task)
        old = [protocol.new_images(one).among(classes) for one in range(task)]
        kept = [one.take(one.rows_of(name)[:4]) for one in old for name in one.classes]
        return Lesson(
            task=task,
            new=protocol.tasks[task],
            images=join(*kept, protocol.new_images(task)),
            preset=self.preset,
            preprocessing=preprocessing_of(self.preset),
            seed=task,
            progress=Silent(),
        )

    def teach(self, method: Method, task: int) -> None:
        torch.manual_seed(task)
        lesson = self.lesson(task)
        method.expand(lesson.new)
        method.learn(lesson)
        method.requires_grad_(False).eval()


def some_images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(7))
