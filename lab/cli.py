"""Read the command line of the lab."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch

from lab.cell import Cell, Run, lab_folder, preprocessing_of
from lab.dataset import read_dataset
from lab.presets import PRESETS, Preset, preset_named
from lab.registry import read_choice
from lab.side_by_side import Job, run_side_by_side
from model_store.cli.command import run
from model_store.errors import WrongUsage
from trainer.progress import show_progress

RESULTS = Path("lab/results")


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    return run(lambda: int(asked.command(asked)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    commands = parser.add_subparsers(required=True)
    compare = commands.add_parser("compare", help="run methods, seeds and settings")
    compare.add_argument("methods", nargs="+", metavar="METHOD[:OPTION=VALUE,…]")
    compare.add_argument("--data", type=Path, required=True, help="a zip of train/ and test/")
    compare.add_argument("--preset", default="short", help=f"{', '.join(PRESETS)} (short)")
    compare.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="other numbers than the preset's"
    )
    compare.add_argument("--seeds", nargs="+", type=int, default=[0])
    compare.add_argument("--out", type=Path, help="the file of results (lab/results/PRESET.jsonl)")
    compare.add_argument("--jobs", type=int, default=1, help="cells side by side (1)")
    compare.set_defaults(command=_compare)
    return parser


def _compare(asked: argparse.Namespace) -> int:
    cells = [
        Cell(
            choice=read_choice(text),
            preset_name=asked.preset,
            setting=",".join(sorted(asked.set)),
            preset=_changed(preset_named(asked.preset), asked.set),
            seed=seed,
        )
        for seed in asked.seeds
        for text in asked.methods
    ]
    data = read_dataset(
        asked.data, preprocessing=preprocessing_of(cells[0].preset), kept=lab_folder()
    )
    out = asked.out or RESULTS / f"{asked.preset}.jsonl"
    torch.set_num_threads(1)
    cell_runs = (Run(cell, data, out=out, progress=show_progress()) for cell in cells)
    if asked.jobs == 1:
        for one in cell_runs:
            one.go()
        return 0
    jobs = [Job(cell=one.cell, base=one.base_path) for one in cell_runs]
    failed = run_side_by_side(jobs, data=asked.data, out=out, at_once=asked.jobs)
    for cell in failed:
        print(f"lab: {cell} failed", file=sys.stderr)
    return 1 if failed else 0


def _changed(preset: Preset, settings: Sequence[str]) -> Preset:
    known = [one.name for one in fields(Preset) if one.type == "int"]
    changes: dict[str, int] = {}
    for one in settings:
        name, _, value = one.partition("=")
        if name not in known:
            raise WrongUsage(f"there is no setting {name!r}; the settings: {', '.join(known)}")
        if not value.isdecimal():
            raise WrongUsage(f"--set {one}: {name} must be a whole number")
        changes[name] = int(value)
    return replace(preset, **changes)  # type: ignore[arg-type]
