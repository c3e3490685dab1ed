"""Teach transformers three tiny tasks, with or without an interruption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lab.cell import Cell, Run
from lab.dataset import Dataset
from lab.presets import PRESETS, Preset
from lab.registry import read_choice
from tests.lab.striped import Broken, stripes
from trainer.progress import Phase, Progress
from trainer.time_left import ExpectedPhase

PRESET = replace(
    PRESETS["mini"],
    image_size=16,
    patch_size=4,
    images=24,
    memory=48,
    first_epochs=6,
    epochs=6,
    tuning_epochs=3,
    rate=3e-3,
)


def bars() -> Dataset:
    """Draw images of three colours, with bars across or along."""
    return Dataset(train=stripes(24, seed=0), test=stripes(10, seed=1), digest="bars")


class Silent:
    """Progress that tells nothing, and breaks in the middle of a phase if asked to."""

    def __init__(self, *, breaks_in: str = "", on_task: int = 0) -> None:
        self._breaks_in, self._on_task = breaks_in, on_task
        self._task, self._phase, self._left = "", "", 0

    def note(self, text: str) -> None:
        self._task = text if ": task " in text else self._task

    @contextmanager
    def whole(self, expected: Sequence[ExpectedPhase]) -> Iterator[None]:
        yield

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Phase]:
        self._phase, self._left = name, total // 2
        yield self

    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        self._left -= images
        here = self._phase == self._breaks_in and f"task {self._on_task} of" in self._task
        if here and self._left < 0:
            raise Broken(self._phase)


def run_of(
    method: str, folder: Path, *, preset: Preset = PRESET, progress: Progress | None = None
) -> Run:
    cell = Cell(choice=read_choice(method), preset_name="bars", setting="", preset=preset, seed=0)
    return Run(cell, bars(), out=folder / "out.jsonl", progress=progress or Silent(), folder=folder)


def learnt(method: str, folder: Path) -> Run:
    run = run_of(method, folder)
    run.go()
    return run


def learnt_in_two_parts(method: str, folder: Path, *, phase: str, task: int) -> Run:
    """Break off in the middle of a phase, and go on in a new run."""
    with suppress(Broken):
        run_of(method, folder, progress=Silent(breaks_in=phase, on_task=task)).go()
        raise AssertionError("the run did not break off")
    run = learnt(method, folder)
    assert run.lines[task - 1].resumed
    return run


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Name the tensors of `one` that are others in `other`."""
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
