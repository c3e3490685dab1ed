"""dne-train: learn tasks, evaluate versions and report on them.

Import torch in commands only: importing it takes seconds, and --help does not need it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from model_store.cli.command import (
    EXIT_NOT_PROMOTED,
    EXIT_OK,
    add_channel_option,
    add_version_option,
    current_actor,
    print_json,
    run,
)
from model_store.cli.parser import Parser
from model_store.errors import WrongUsage
from model_store.tables import counted
from trainer.cluster.entrypoint import add_cluster_options
from trainer.label_studio import command as label_studio
from trainer.options import (
    add_options,
    add_processes_option,
    add_running_options,
    option_name,
    read_options,
)
from trainer.ranks.launch import launch, refuse_processes
from trainer.ranks.place import Place, cores_here, place_of, refuse_ranks
from trainer.request import AddTask, Deepen, Evaluate, PretrainedFile, Report, Work

if TYPE_CHECKING:
    from trainer.progress import Progress
    from trainer.ranks.ranks import Ranks
    from trainer.versions.outcome import Outcome

Asked = TypeVar("Asked")

INBOX = Path("/inbox")
"""Stands for the data of `--from-inbox` where a run is named by its data."""
MAX_THREADS = 1024
"""More threads than any machine has cores: torch fails on huge numbers of threads."""


def main(arguments: Sequence[str] | None = None) -> int:
    # Set before torch is loaded. Threads that spin while they wait for each other slow training
    # down tenfold as soon as anything else uses the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(given)
    options.arguments = given
    return run(lambda: _command(options, given))


def _command(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Run a command here, or in as many processes as are asked for."""
    place, processes = place_of(), getattr(options, "processes", None)
    if processes is not None:
        refuse_processes(processes, place)
        elsewhere = getattr(options, "on", None) or getattr(options, "from_inbox", False)
        if processes > 1 and place is None and not elsewhere:
            return launch(given, processes=processes)
    return int(options.command(options))


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="dne-train", description="Teaches a classifier new classes, one task at a time."
    )
    add_version_option(top)
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    _add_task_parser(commands)
    _deepen_parser(commands)
    _worker_parser(commands)
    label_studio.add_command(commands)
    _evaluate_parser(commands)
    _report_parser(commands)
    return top


def _add_task_parser(commands: Any) -> None:
    one = commands.add_parser(
        "add-task",
        help="learn new classes and publish a version",
        description="Learns the classes in DATA, publishes a version and, if the gate lets it "
        "pass, promotes it. The first task makes version 1.",
    )
    one.set_defaults(command=_add_task)
    one.add_argument(
        "--from-inbox",
        action="store_true",
        help="learn from all labels of the store's inbox that no version has used: known classes "
        "are extended, and new names become a task",
    )
    add_options(one, AddTask)
    add_processes_option(one)
    add_running_options(one)
    add_channel_option(one)
    add_cluster_options(one)


def _deepen_parser(commands: Any) -> None:
    one = commands.add_parser(
        "deepen",
        help="learn an expert for classes that were added without one",
        description="Learns one expert for all tasks that `add-task --quick` has added since the "
        "last expert, from the exemplars in the store, publishes a version and promotes it if it "
        "is better than the version before, beyond chance.",
    )
    one.set_defaults(command=_deepen)
    add_options(one, Deepen)
    add_processes_option(one)
    add_running_options(one)
    add_channel_option(one)


def _worker_parser(commands: Any) -> None:
    one = commands.add_parser(
        "worker",
        help="run the jobs that the label page asks for",
        description="Takes jobs of a channel, one at a time, and learns from the labels of the "
        "inbox as `add-task --from-inbox` does. The job of a worker that died is taken over.",
    )
    one.set_defaults(command=_work)
    add_options(one, Work)
    add_running_options(one)
    add_channel_option(one)


def _evaluate_parser(commands: Any) -> None:
    one = commands.add_parser(
        "evaluate",
        help="judge a version by labelled images",
        description="Accuracy of a version on the images in DATA.",
    )
    one.set_defaults(command=_evaluate)
    add_options(one, Evaluate)
    add_running_options(one)
    add_channel_option(one)


def _report_parser(commands: Any) -> None:
    one = commands.add_parser(
        "report",
        help="write a version's report as a page and as JSON",
        description="Accuracy by class and task, confusion, forgetting, calibration and growth of "
        "a version, measured on its held-out images: report.html and report.json in DIR.",
    )
    one.set_defaults(command=_report)
    add_options(one, Report)
    add_running_options(one)


def _add_task(options: argparse.Namespace) -> int:
    if options.from_inbox == hasattr(options, "data"):
        raise WrongUsage("give either --data DATA or --from-inbox")
    if options.from_inbox:
        return _learn_from_inbox(options)
    if options.on is not None:
        return _add_task_elsewhere(options)
    data: Path = options.data
    request = _request(AddTask, options, of=data, pretrained=_pretrained(options))
    _prepare_torch(options)
    from trainer.add_task import add_task

    with _ranks(options) as (ranks, progress):
        return _tell(add_task(request, progress=progress, ranks=ranks), options, ranks)


def _add_task_elsewhere(options: argparse.Namespace) -> int:
    read_options(AddTask, options, pretrained=_pretrained(options))  # wrong usage is told here
    from trainer.cluster.ray_job import run_on_ray

    return run_on_ray(options, options.arguments)


def _learn_from_inbox(options: argparse.Namespace) -> int:
    if options.on is not None or (options.processes or 1) > 1:
        raise WrongUsage("--from-inbox learns in one process here: leave out --on and --processes")
    refuse_ranks("add-task --from-inbox")
    request = _request(AddTask, options, of=INBOX, data=INBOX, pretrained=_pretrained(options))
    _prepare_torch(options)
    from trainer.add_task import add_task
    from trainer.inbox.from_inbox import learn_from_inbox
    from trainer.progress import show_progress

    learnt = learn_from_inbox(request, add_task=add_task, progress=show_progress())
    if options.json:
        print_json(learnt.as_json())
    else:
        _tell_outcomes(learnt.outcomes, options)
    return EXIT_NOT_PROMOTED if learnt.any_refused else EXIT_OK


def _work(options: argparse.Namespace) -> int:
    work = read_options(Work, options)
    checkpoint = _checkpoint_folder(options, of=INBOX)
    _prepare_torch(options)
    from trainer.add_task import add_task
    from trainer.inbox.running import run_worker

    done = run_worker(work, add_task=add_task, checkpoint=checkpoint)
    if options.json:
        print_json({"jobs": done})
    return EXIT_OK


def _deepen(options: argparse.Namespace) -> int:
    request = _request(Deepen, options, of=Path("deepen"))
    _prepare_torch(options)
    from trainer.deepen import NothingToDeepen, deepen

    with _ranks(options) as (ranks, progress):
        try:
            outcome = deepen(request, progress=progress, ranks=ranks)
        except NothingToDeepen as nothing:
            if not request.if_needed:
                raise
            return _tell_nothing(str(nothing), options, ranks)
        return _tell(outcome, options, ranks)


def _tell_nothing(why: str, options: argparse.Namespace, ranks: Ranks) -> int:
    """Say that nothing had to be learnt, which is no failure."""
    if ranks.rank:
        pass  # the first rank has said it
    elif options.json:
        print_json({"version": None, "deepened": [], "nothing": why})
    else:
        print(f"nothing to learn: {why}")
    return EXIT_OK


@contextmanager
def _ranks(options: argparse.Namespace) -> Iterator[tuple[Ranks, Progress]]:
    """Join the other processes of the run, if there are any. The first one shows the progress."""
    from model_store.network.device import choose_device
    from trainer.progress import Silent, show_progress
    from trainer.ranks.ranks import ALONE, refuse_differences

    place = place_of()
    if place is None:
        yield ALONE, show_progress()
        return
    from trainer.ranks.member import taking_part

    with taking_part(place, on_gpu=choose_device(options.device).type == "cuda") as ranks:
        refuse_differences(ranks, _shared(options), what="options")
        progress = Silent() if ranks.rank else show_progress()
        progress.note(_how_shared(place))
        yield ranks, progress


def _shared(options: argparse.Namespace) -> dict[str, object]:
    """List the options that all ranks must have alike: machines may differ in paths and threads."""
    paths = {"arguments", "data", "val_data", "checkpoint", "file", "sign"}
    own = {"command", "json", "threads", *paths}
    return {name: value for name, value in sorted(vars(options).items()) if name not in own}


def _how_shared(place: Place) -> str:
    import torch

    threads, cores = torch.get_num_threads(), cores_here()
    said = f"learning in {place.ranks} processes, {counted(threads, 'thread')} each"
    if place.local_ranks * threads > cores:
        said += f"; this machine has {counted(cores, 'core')}, so they wait for each other"
    return said


def _tell(outcome: Outcome, options: argparse.Namespace, ranks: Ranks) -> int:
    if ranks.rank:
        pass  # the first rank has said it
    elif options.json:
        print_json(outcome.as_json())
    else:
        _tell_outcomes([outcome], options)
    return EXIT_NOT_PROMOTED if outcome.any_refused else EXIT_OK


def _tell_outcomes(outcomes: Sequence[Outcome], options: argparse.Namespace) -> None:
    from trainer.report.closing import Closing
    from trainer.report.text import tell_outcome

    for outcome in outcomes:
        tell_outcome(outcome)
    for outcome in outcomes[-1:]:
        Closing(outcome=outcome, store=options.store, channel=options.channel).tell()


def _request(
    asked: type[Asked], options: argparse.Namespace, *, of: Path, **others: object
) -> Asked:
    from model_store.records.signing import load_signer
    from trainer.evaluation.training_run import command_of
    from trainer.tokens.cache import default_folder

    return read_options(
        asked,
        options,
        actor=current_actor(),
        signer=load_signer(options.sign) if options.sign else None,
        checkpoint=_checkpoint_folder(options, of=of),
        tokens=default_folder(),
        command=command_of(options.arguments),
        measures_threads=options.threads is None and place_of() is None,
        **others,
    )


def _pretrained(options: argparse.Namespace) -> PretrainedFile | None:
    given = [option_name(one) for one in fields(PretrainedFile) if hasattr(options, one.name)]
    if given and not hasattr(options, "file"):
        raise WrongUsage(f"{given[0]} is about a pre-trained file; give one with --pretrained")
    return read_options(PretrainedFile, options) if given else None


def _checkpoint_folder(options: argparse.Namespace, *, of: Path) -> Path:
    if not hasattr(options, "checkpoint"):
        from trainer.learning.checkpoint import default_folder

        return default_folder(store=options.store, data=of)
    chosen: Path = options.checkpoint
    if chosen.exists() and not chosen.is_dir():
        raise WrongUsage(f"--checkpoint {chosen} is not a folder")
    store = Path(options.store).resolve()
    if "://" not in options.store and chosen.resolve().is_relative_to(store):
        raise WrongUsage(f"--checkpoint {chosen} is inside the store; choose a folder outside it")
    return chosen


def _evaluate(options: argparse.Namespace) -> int:
    refuse_ranks("evaluate")
    _prepare_torch(options)
    from trainer.evaluation.evaluate import evaluate
    from trainer.progress import show_progress
    from trainer.report.text import tell_evaluation
    from trainer.tokens.cache import default_folder

    request = read_options(Evaluate, options, tokens=default_folder())
    report = evaluate(request, progress=show_progress())
    if options.json:
        print_json(report)
        return EXIT_OK
    tell_evaluation(report)
    return EXIT_OK


def _report(options: argparse.Namespace) -> int:
    refuse_ranks("report")
    _prepare_torch(options)
    from model_store.tables import percent
    from trainer.progress import show_progress
    from trainer.report.report import write_report

    report, paths = write_report(read_options(Report, options), progress=show_progress())
    if options.json:
        print_json({**report, "paths": [str(path) for path in paths]})
        return EXIT_OK
    print(f"version {report['version']}, judged by {counted(report['images'], 'held-out image')}:")
    print(f"accuracy {percent(report['accuracy']['all'])}; the report is in {paths[-1]}")
    return EXIT_OK


def _prepare_torch(options: argparse.Namespace) -> None:
    import torch

    place = place_of()
    if place is not None and options.threads is None:
        torch.set_num_threads(max(1, cores_here() // place.local_ranks))
    if options.threads is not None:
        if not 1 <= options.threads <= MAX_THREADS:
            raise WrongUsage(
                f"--threads must be between 1 and {MAX_THREADS}, not {options.threads}"
            )
        torch.set_num_threads(options.threads)
    # Acts as use_deterministic_algorithms(True, warn_only=True), which would also import torch's
    # compiler: two seconds of processor time for every command.
    torch.set_deterministic_debug_mode("warn")
