"""Teach transformers three tiny tasks, with or without an interruption."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lab.cell import Cell, Run
from lab.dataset import Dataset
from lab.presets import PRESETS, Preset
from lab.registry import read_choice
from tests.lab.breaking import Broken, Silent
from tests.lab.striped import stripes
from trainer.progress import Progress

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
