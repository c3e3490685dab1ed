"""Parse the command line of `dne-train`, and run the command that it names.

Import torch in commands only: importing it takes seconds, and --help does not need it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from model_store.cli.command import add_channel_option, add_json_option, add_version_option, run
from model_store.command_line import Parser
from trainer.cli import commands, label_studio, options
from trainer.cli.commands import add_cluster_options
from trainer.cli.requests import with_options
from trainer.ranks.launch import launch, place_of, refuse_processes

_AddOptions = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    # Set before torch is loaded. Threads that spin while they wait for each other slow training
    # down tenfold as soon as anything else uses the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    given = sys.argv[1:] if arguments is None else list(arguments)
    parsed = build_parser().parse_args(given)
    parsed.arguments = given
    return run(lambda: _command(parsed, given), worded=with_options)


def _command(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Run a command here, or in as many processes as are asked for."""
    place, processes = place_of(), getattr(parsed, "processes", None)
    if processes is not None:
        refuse_processes(processes, place)
        elsewhere = getattr(parsed, "on", None) or getattr(parsed, "from_inbox", False)
        if processes > 1 and place is None and not elsewhere:
            return launch(given, processes=processes)
    return int(parsed.command(parsed))


def build_parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="dne-train", description="Teaches a classifier new classes, one task at a time."
    )
    add_version_option(top)
    subparsers = top.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Run, *adders: _AddOptions, help: str, description: str) -> None:
        made = subparsers.add_parser(name, help=help, description=description)
        made.set_defaults(command=command)
        for add_options in adders:
            add_options(made)

    learning = (options.add_running_options, add_channel_option)
    add(
        "add-task",
        commands.add_task,
        options.add_add_task_options,
        *learning,
        add_cluster_options,
        help="learn new classes and publish a version",
        description="Learns the classes in DATA, publishes a version and, if the gate lets it "
        "pass, promotes it. The first task makes version 1.",
    )
    add(
        "deepen",
        commands.deepen,
        options.add_deepen_options,
        *learning,
        help="grow the network for classes that were added quickly",
        description="Adapts the pre-trained expert, or learns one more expert, for all tasks that "
        "`add-task --quick` has added, from the exemplars in the store; publishes a version and "
        "promotes it if it earns its cost.",
    )
    add(
        "worker",
        commands.work,
        options.add_worker_options,
        *learning,
        help="run the jobs that the label page asks for",
        description="Takes jobs of a channel, one at a time, and learns from the labels of the "
        "inbox as `add-task --from-inbox` does. The job of a worker that died is taken over.",
    )
    label_studio.add_command(subparsers)
    add(
        "evaluate",
        commands.evaluate,
        options.add_evaluate_options,
        *learning,
        help="judge a version by labelled images",
        description="Accuracy of a version on the images in DATA.",
    )
    add(
        "report",
        commands.report,
        options.add_report_options,
        options.add_running_options,
        help="write a version's report as a page and as JSON",
        description="Accuracy by class and task, confusion, forgetting, calibration and growth of "
        "a version, measured on its held-out images: report.html and report.json in DIR.",
    )
    add(
        "backbones",
        commands.backbones,
        add_json_option,
        help="list the pre-trained backbones that --pretrained knows by name",
        description="Lists names for `add-task --pretrained`: size of the download, work for one "
        "image of 224 pixels, licence, whether it is on this machine, and what each is good for. "
        "Any other vision transformer of the Hugging Face Hub is taken as owner/name.",
    )
    return top
