"""Compare methods of class-incremental learning."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from lab import results
from lab.cell import Cell, Run, lab_folder, preprocessing_of
from lab.dataset import Dataset, read_dataset
from lab.plan import PLANS, Step, plan_of, steps
from lab.presets import PRESETS, Preset, changed, preset_named
from lab.registry import METHODS, read_choice
from lab.report.page import Part, make_report, notes_in
from lab.side_by_side import Job, run_side_by_side
from lab.speed import measure
from model_store.cli.command import run
from model_store.errors import WrongUsage
from model_store.tables import columns, counted
from trainer.progress import show_progress

RESULTS = Path("lab/results")
PAGE = Path("docs/comparisons.md")
NOTES = PAGE
"""The page of the last report: its notes are taken over."""


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    return run(lambda: int(asked.command(asked)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    commands = parser.add_subparsers(required=True)
    _add_compare(commands.add_parser("compare", help="run methods, seeds and settings"))
    _add_campaign(commands.add_parser("campaign", help="run the missing cells of the plan"))
    _add_plan(commands.add_parser("plan", help="list the cells of the plan and their states"))
    _add_report(commands.add_parser("report", help="write tables and plots of results"))
    _add_speed(commands.add_parser("speed", help="compare a cell's steps with a bare loop"))
    return parser


def _add_compare(parser: argparse.ArgumentParser) -> None:
    known = f"methods: {', '.join(METHODS)}"
    parser.add_argument("methods", nargs="+", metavar="METHOD[:OPTION=VALUE,…]", help=known)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="other numbers than the preset's"
    )
    parser.add_argument("--seeds", nargs="+", type=_whole_number, default=[0])
    _add_run_options(parser)
    parser.set_defaults(command=_compare)


def _add_campaign(parser: argparse.ArgumentParser) -> None:
    _add_run_options(parser)
    parser.set_defaults(command=_campaign, jobs=2)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="a zip of train/ and test/")
    _add_preset(parser)
    parser.add_argument("--out", type=Path, help="the file of results (lab/results/PRESET.jsonl)")
    parser.add_argument("--jobs", type=_job_count, default=1, help="cells side by side")


def _add_preset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="short", help=f"{', '.join(PRESETS)} (short)")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_preset(parser)
    parser.add_argument("--results", nargs="+", type=Path, help="(lab/results/PRESET.jsonl)")
    parser.set_defaults(command=_plan)


def _add_report(parser: argparse.ArgumentParser) -> None:
    told = f"a file of each preset ({RESULTS}/PRESET.jsonl)"
    parser.add_argument("--results", nargs="+", type=Path, help=told)
    parser.add_argument("--out", type=Path, default=PAGE, help=f"({PAGE})")
    parser.add_argument("--notes", type=Path, default=NOTES, help=f"Markdown to include ({NOTES})")
    parser.set_defaults(command=_report)


def _add_speed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("methods", nargs="+", metavar="METHOD[:OPTION=VALUE,…]")
    parser.add_argument("--data", type=Path, required=True, help="a zip of train/ and test/")
    _add_preset(parser)
    parser.set_defaults(command=_speed)


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _job_count(text: str) -> int:
    count = _whole_number(text)
    if count < 1:
        raise argparse.ArgumentTypeError("at least one cell runs at a time")
    return count


def _compare(asked: argparse.Namespace) -> int:
    setting = ",".join(sorted(asked.set))
    cells = [
        Cell(
            choice=read_choice(text),
            preset_name=asked.preset,
            setting=setting,
            preset=changed(preset_named(asked.preset), setting),
            seed=seed,
        )
        for seed in asked.seeds
        for text in asked.methods
    ]
    return _run(cells, asked)


def _campaign(asked: argparse.Namespace) -> int:
    lines = _lines([_out(asked)], missing_is_empty=True)
    planned = steps(lines, preset=asked.preset, plan=plan_of(asked.preset))
    for step in planned:
        if step.state == "unknown":
            _tell(f"left out: {step.planned.title}: {step.problem}")
    left = [step for step in planned if step.state in ("unfinished", "missing")]
    _tell(_time_left(left, at_once=asked.jobs))
    return _run([step.cell(asked.preset) for step in left], asked)


def _read(path: Path, preset: Preset) -> Dataset:
    progress = show_progress()
    return read_dataset(
        path,
        preprocessing=preprocessing_of(preset),
        domain=preset.domain,
        kept=lab_folder(),
        note=progress.note,
    )


def _run(cells: Sequence[Cell], asked: argparse.Namespace) -> int:
    if not cells:
        return 0
    data = _read(asked.data, cells[0].preset)
    cell_runs = (Run(cell, data, out=_out(asked), progress=show_progress()) for cell in cells)
    if asked.jobs == 1:
        for one in cell_runs:
            one.go()
        return 0
    jobs = [Job(cell=one.cell, base=one.base_path) for one in cell_runs]
    failed = run_side_by_side(jobs, data=asked.data, out=_out(asked), at_once=asked.jobs)
    for cell in failed:
        _tell(f"{cell} failed")
    return 1 if failed else 0


def _out(asked: argparse.Namespace) -> Path:
    path: Path = asked.out or RESULTS / f"{asked.preset}.jsonl"
    return path


def _plan(asked: argparse.Namespace) -> int:
    paths = asked.results or [RESULTS / f"{asked.preset}.jsonl"]
    lines = _lines(paths, missing_is_empty=True)
    planned = steps(lines, preset=asked.preset, plan=plan_of(asked.preset))
    rows = [("state", "cell", "seed", "minutes left", "")]
    rows += [
        (one.state, one.planned.title, str(one.seed), _minutes(one.minutes), one.problem)
        for one in planned
    ]
    print(columns(rows))
    print(_time_left([one for one in planned if one.state != "unknown"], at_once=2))
    return 0


def _minutes(minutes: float | None) -> str:
    return "?" if minutes is None else f"{minutes:.0f}"


def _time_left(left: Sequence[Step], *, at_once: int) -> str:
    waiting = [one for one in left if one.state != "done"]
    known = [one.minutes for one in waiting if one.minutes is not None]
    told = [f"{counted(len(waiting), 'cell')} to run"]
    if known:
        told.append(
            f"{sum(known):.0f} minutes of one core, about {sum(known) / at_once:.0f} with "
            f"{at_once} at a time"
        )
    if len(known) < len(waiting):
        told.append(f"{len(waiting) - len(known)} of unknown length")
    return "; ".join(told)


def _report(asked: argparse.Namespace) -> int:
    files = {name: [RESULTS / f"{name}.jsonl"] for name in PLANS}
    if asked.results:
        files = {}
        for path in asked.results:
            for preset in {line.preset for line in _lines([path])}:
                files.setdefault(preset, []).append(path)
    if not files:
        raise WrongUsage(f"there are no results in {', '.join(map(str, asked.results))}")
    parts = [
        Part.of(preset, _lines(paths, missing_is_empty=not asked.results))
        for preset, paths in files.items()
    ]
    notes = notes_in(asked.notes.read_text()) if asked.notes.exists() else ""
    made = make_report(parts, folder=asked.out.stem, notes=notes)
    for path in made.write(asked.out):
        print(path)
    return 0


def _speed(asked: argparse.Namespace) -> int:
    preset = preset_named(asked.preset)
    data = _read(asked.data, preset)
    rows = [("method", "images/s learning", "images/s bare", "share")]
    for text in asked.methods:
        found = measure(read_choice(text), data, preset, progress=show_progress())
        rows.append((text, f"{found.learning:.0f}", f"{found.bare:.0f}", f"{found.share:.2f}"))
    print(columns(rows))
    return 0


def _lines(paths: Sequence[Path], *, missing_is_empty: bool = False) -> list[results.Line]:
    there = [path for path in paths if path.exists()] if missing_is_empty else paths
    return results.read(there, note=_tell)


def _tell(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr)
