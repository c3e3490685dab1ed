"""Read the command line of the lab."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from lab import results
from lab.cell import Cell, Run, preprocessing_of
from lab.dataset import read_dataset
from lab.presets import PRESETS, changed, preset_named
from lab.registry import read_choice
from lab.report.page import make_report
from lab.side_by_side import Job, run_side_by_side
from model_store.cli.command import run
from model_store.errors import WrongUsage
from trainer.progress import show_progress

RESULTS = Path("lab/results")
PAGE = Path("docs/comparisons.md")
NOTES = Path("docs/comparisons_notes.md")


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
    report = commands.add_parser("report", help="write tables and plots of results")
    report.add_argument("--results", nargs="+", type=Path, default=[RESULTS / "short.jsonl"])
    report.add_argument("--out", type=Path, default=PAGE, help=f"({PAGE})")
    report.add_argument("--notes", type=Path, default=NOTES, help=f"Markdown to include ({NOTES})")
    report.set_defaults(command=_report)
    return parser


def _compare(asked: argparse.Namespace) -> int:
    cells = [
        Cell(
            choice=read_choice(text),
            preset_name=asked.preset,
            setting=",".join(sorted(asked.set)),
            preset=changed(preset_named(asked.preset), ",".join(asked.set)),
            seed=seed,
        )
        for seed in asked.seeds
        for text in asked.methods
    ]
    data = read_dataset(asked.data, preprocessing=preprocessing_of(cells[0].preset))
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


def _report(asked: argparse.Namespace) -> int:
    lines = results.read(asked.results)
    if not lines:
        raise WrongUsage(f"there are no results in {', '.join(map(str, asked.results))}")
    notes = asked.notes.read_text() if asked.notes.exists() else ""
    made = make_report(lines, preset=lines[0].preset, folder=asked.out.stem, notes=notes)
    for path in made.write(asked.out):
        print(path)
    return 0
