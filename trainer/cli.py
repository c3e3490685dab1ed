"""dne-train: learns tasks and evaluates versions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_store.cli.command import (
    EXIT_NOT_PROMOTED,
    EXIT_OK,
    add_channel_option,
    add_sign_option,
    add_version_option,
    current_actor,
    print_json,
    run,
    version_number,
)
from trainer.learning.presets import Shape
from trainer.options import (
    gate_options,
    learning_options,
    pretrained_options,
    running_options,
    size_options,
)

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not
    from trainer.request import AddTask, FromFile

MAX_THREADS = 1024
"""Threads beyond any machine's cores: torch fails on huge numbers, or cannot start them all."""


def main(arguments: Sequence[str] | None = None) -> int:
    # Before torch is loaded: threads that spin while they wait for each other bring training to
    # a tenth of its speed as soon as anything else uses the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = parser().parse_args(arguments)
    return run(lambda: int(options.command(options)))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="dne-train", description="Teaches a classifier new classes, one task at a time."
    )
    add_version_option(top)
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    _add_task_parser(commands)
    _evaluate_parser(commands)
    _report_parser(commands)
    return top


def _add_task_parser(commands: Any) -> None:
    one = commands.add_parser(
        "add-task",
        help="learn new classes and publish a version",
        description="Learns the classes in DIR, one folder of images a class, publishes a version "
        "and, if the gate lets it pass, promotes it. The first task makes version 1.",
    )
    one.set_defaults(command=_add_task)
    one.add_argument("--data", metavar="DIR", type=Path, required=True, help="one folder a class")
    one.add_argument("--name", metavar="N", help="the task's name (default: the folder's name)")
    one.add_argument(
        "--extend",
        action="store_true",
        help="DIR has more images of classes that are known: tune the classifier, add no expert",
    )
    one.add_argument(
        "--val-data", metavar="DIR", type=Path, help="judge by these images, not by held-out ones"
    )
    one.add_argument("--skip-bad", action="store_true", help="go on without unreadable images")
    one.add_argument(
        "--no-promote", action="store_true", help="publish only; the channel does not move"
    )
    one.add_argument("--reason", metavar="T", default="", help="why, for the channel's history")
    one.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        help="where the run is kept each epoch, so that the same command goes on after an "
        "interruption (default: below $XDG_CACHE_HOME/dne-serve)",
    )
    add_sign_option(one)
    size_options(one)
    pretrained_options(one)
    learning_options(one)
    gate_options(one)
    running_options(one)
    add_channel_option(one)


def _evaluate_parser(commands: Any) -> None:
    one = commands.add_parser(
        "evaluate",
        help="judge a version by labelled images",
        description="Accuracy of a version on the images in DIR, one folder a class.",
    )
    one.set_defaults(command=_evaluate)
    one.add_argument("--data", metavar="DIR", type=Path, required=True, help="one folder a class")
    one.add_argument(
        "--version", metavar="N", type=version_number, help="default: what the channel names"
    )
    one.add_argument(
        "--unknown-data",
        metavar="DIR",
        type=Path,
        help="images of no class of the model: how well they are told from those in --data",
    )
    one.add_argument("--skip-bad", action="store_true", help="go on without unreadable images")
    running_options(one)
    add_channel_option(one)


def _report_parser(commands: Any) -> None:
    one = commands.add_parser(
        "report",
        help="write a version's report as a page and as JSON",
        description="Accuracy by class and task, confusion, forgetting, calibration and growth of "
        "a version, measured on its held-out images: report.html and report.json in DIR.",
    )
    one.set_defaults(command=_report)
    one.add_argument("version", metavar="N", type=version_number, help="the number of the version")
    one.add_argument("--out", metavar="DIR", type=Path, required=True, help="where to write it")
    running_options(one)


def _add_task(options: argparse.Namespace) -> int:
    request = _request(options)
    _prepare_torch(options)
    from trainer.add_task import add_task
    from trainer.progress import show_progress
    from trainer.report.text import tell_outcome

    outcome = add_task(request, progress=show_progress())
    if options.json:
        print_json(outcome.as_json())
    else:
        tell_outcome(outcome)
    return EXIT_NOT_PROMOTED if outcome.refused else EXIT_OK


def _request(options: argparse.Namespace) -> AddTask:
    from model_store.errors import WrongUsage
    from model_store.records.signing import load_signer
    from trainer.evaluation.gate import Limits
    from trainer.evaluation.unknown import check_rate
    from trainer.learning.plan import Effort
    from trainer.request import AddTask

    if options.memory < 0:
        raise WrongUsage(f"--memory must be 0 or more, not {options.memory}")
    if not 0 <= options.seed < 2**63:
        raise WrongUsage(f"--seed must be between 0 and 2^63, not {options.seed}")
    return AddTask(
        store=options.store,
        data=options.data,
        channel=options.channel,
        name=options.name,
        extend=options.extend,
        val_data=options.val_data,
        shape=Shape(
            preset=options.preset,
            image_size=options.image_size,
            patch_size=options.patch_size,
            depth=options.depth,
            head_width=options.head_width,
            heads=options.heads,
        ),
        pretrained=_from_file(options),
        effort=Effort(
            epochs=options.epochs,
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
        ),
        augment=options.augment,
        flip=options.flip,
        loss=options.loss,
        memory=options.memory,
        seed=options.seed,
        promote=not options.no_promote,
        limits=Limits(
            max_drop=options.max_drop,
            min_new=options.min_new,
            max_latency_ms=options.max_latency_ms,
            max_bytes=options.max_bytes,
            force=options.force,
        ),
        unknown_rate=check_rate(options.unknown_rate),
        skip_bad=options.skip_bad,
        device=options.device,
        actor=current_actor(),
        signer=load_signer(options.sign) if options.sign else None,
        reason=options.reason,
        checkpoint=_checkpoint_folder(options),
    )


def _from_file(options: argparse.Namespace) -> FromFile | None:
    from model_store.errors import WrongUsage
    from trainer.request import FromFile

    names = ("unfreeze_last", "normalise", "attention_heads")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.pretrained is not None:
        return FromFile(file=options.pretrained, **given)
    if given:
        option = next(iter(given)).replace("_", "-")
        raise WrongUsage(f"--{option} is about a pre-trained file; give one with --pretrained")
    return None


def _checkpoint_folder(options: argparse.Namespace) -> Path:
    from model_store.errors import WrongUsage
    from trainer.learning.checkpoint import default_folder

    chosen: Path | None = options.checkpoint
    if chosen is None:
        return default_folder(store=options.store, data=options.data)
    if chosen.exists() and not chosen.is_dir():
        raise WrongUsage(f"--checkpoint {chosen} is not a folder")
    store = Path(options.store).resolve()
    if "://" not in options.store and chosen.resolve().is_relative_to(store):
        raise WrongUsage(f"--checkpoint {chosen} is inside the store; choose a folder outside it")
    return chosen


def _evaluate(options: argparse.Namespace) -> int:
    _prepare_torch(options)
    from trainer.evaluation.evaluate import Evaluate, evaluate
    from trainer.progress import show_progress
    from trainer.report.text import tell_evaluation

    request = Evaluate(
        store=options.store,
        data=options.data,
        channel=options.channel,
        version=options.version,
        unknown_data=options.unknown_data,
        skip_bad=options.skip_bad,
        device=options.device,
    )
    report = evaluate(request, progress=show_progress())
    if options.json:
        print_json(report)
        return EXIT_OK
    tell_evaluation(report)
    return EXIT_OK


def _report(options: argparse.Namespace) -> int:
    _prepare_torch(options)
    from model_store.tables import counted, percent
    from trainer.progress import show_progress
    from trainer.report.report import Report, write_report

    request = Report(
        store=options.store, version=options.version, out=options.out, device=options.device
    )
    report, paths = write_report(request, progress=show_progress())
    if options.json:
        print_json({**report, "paths": [str(path) for path in paths]})
        return EXIT_OK
    print(f"version {report['version']}, judged by {counted(report['images'], 'held-out image')}:")
    print(f"accuracy {percent(report['accuracy']['all'])}; the report is in {paths[-1]}")
    return EXIT_OK


def _prepare_torch(options: argparse.Namespace) -> None:
    import torch

    from model_store.errors import WrongUsage

    if options.threads is not None:
        if not 1 <= options.threads <= MAX_THREADS:
            raise WrongUsage(
                f"--threads must be between 1 and {MAX_THREADS}, not {options.threads}"
            )
        torch.set_num_threads(options.threads)
    # The same as use_deterministic_algorithms(True, warn_only=True), which also imports torch's
    # compiler: two seconds of processor time for every command.
    torch.set_deterministic_debug_mode("warn")
