"""Run the commands of `dne-train`, and print what they return.

Import torch in functions only: importing it takes seconds, and wrong usage is told before.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from model_store.cli.command import EXIT_NOT_PROMOTED, EXIT_OK, print_json, read_keys
from model_store.errors import WrongUsage
from model_store.store.cache import tokens_folder
from model_store.tables import columns, counted
from trainer.backbones import hub
from trainer.backbones.known import KNOWN, backbone_named
from trainer.cli.requests import (
    INBOX,
    checkpoint_folder,
    joined_ranks,
    learning_request,
    prepare_torch,
    pretrained_file,
    read_options,
    refuse_missing_data,
    with_options,
)
from trainer.ranks.launch import refuse_ranks
from trainer.request import AddTask, Deepen, Evaluate, Report, Work

if TYPE_CHECKING:
    from trainer.cluster import Sent
    from trainer.ranks.ranks import Ranks
    from trainer.versions.outcome import Outcome


def add_task(options: argparse.Namespace) -> int:
    if options.from_inbox == hasattr(options, "data"):
        raise WrongUsage("give either --data DATA or --from-inbox")
    if options.from_inbox:
        return _learn_from_inbox(options)
    if options.on is not None:
        return _add_task_elsewhere(options)
    data: Path = options.data
    request = learning_request(AddTask, options, of=data, pretrained=pretrained_file(options))
    refuse_missing_data(options)
    prepare_torch(options)
    from trainer.add_task import add_task as learn_task

    with joined_ranks(options) as (ranks, progress):
        return _tell(learn_task(request, progress=progress, ranks=ranks), options, ranks)


def _add_task_elsewhere(options: argparse.Namespace) -> int:
    read_options(AddTask, options, pretrained=pretrained_file(options))  # wrong usage is told here
    from trainer.cluster import run_on_ray

    sent = sent_to_cluster(options, options.arguments)
    return run_on_ray(sent, address=options.ray_address)


def _learn_from_inbox(options: argparse.Namespace) -> int:
    if options.on is not None or (options.processes or 1) > 1:
        raise WrongUsage("--from-inbox learns in one process here: leave out --on and --processes")
    refuse_ranks("add-task --from-inbox")
    request = learning_request(
        AddTask, options, of=INBOX, data=INBOX, pretrained=pretrained_file(options)
    )
    prepare_torch(options)
    from trainer.loop.learn import learn_from_inbox
    from trainer.progress import show_progress

    learnt = learn_from_inbox(request, progress=show_progress())
    if options.json:
        print_json(learnt.as_json())
    else:
        _tell_outcomes(learnt.outcomes, options)
    return EXIT_NOT_PROMOTED if learnt.any_refused else EXIT_OK


def work(options: argparse.Namespace) -> int:
    request = read_options(Work, options, keys=read_keys(options))
    checkpoint = checkpoint_folder(options, of=INBOX)
    prepare_torch(options)
    from trainer.loop.worker import run_worker

    done = run_worker(request, checkpoint=checkpoint)
    if options.json:
        print_json({"jobs": done})
    return EXIT_OK


def deepen(options: argparse.Namespace) -> int:
    request = learning_request(Deepen, options, of=Path("deepen"))
    refuse_missing_data(options)
    prepare_torch(options)
    from trainer.grow import NothingToDeepen
    from trainer.grow import deepen as learn_expert

    with joined_ranks(options) as (ranks, progress):
        try:
            outcome = learn_expert(request, progress=progress, ranks=ranks)
        except NothingToDeepen as nothing:
            if not request.if_needed:
                raise
            return _tell_nothing(with_options(str(nothing)), options, ranks)
        return _tell(outcome, options, ranks)


def _tell_nothing(why: str, options: argparse.Namespace, ranks: Ranks) -> int:
    """Say that nothing had to be learnt, which is not a failure."""
    if ranks.rank:
        pass  # the first rank has said it
    elif options.json:
        print_json({"version": None, "deepened": [], "nothing": why})
    else:
        print(f"nothing to learn: {why}")
    return EXIT_OK


def _tell(outcome: Outcome, options: argparse.Namespace, ranks: Ranks) -> int:
    if ranks.rank:
        pass  # the first rank has said it
    elif options.json:
        print_json(outcome.as_json())
    else:
        _tell_outcomes([outcome], options)
    return EXIT_NOT_PROMOTED if outcome.any_refused else EXIT_OK


def _tell_outcomes(outcomes: Sequence[Outcome], options: argparse.Namespace) -> None:
    from trainer.report.text import Closing, tell_outcome

    for outcome in outcomes:
        tell_outcome(outcome)
    for outcome in outcomes[-1:]:
        Closing(outcome=outcome, store=options.store, channel=options.channel).tell()


def evaluate(options: argparse.Namespace) -> int:
    refuse_ranks("evaluate")
    refuse_missing_data(options)
    prepare_torch(options)
    from trainer.evaluation.evaluate import evaluate as measure
    from trainer.progress import show_progress
    from trainer.report.text import tell_evaluation

    request = read_options(Evaluate, options, tokens=tokens_folder(options.store))
    measured = measure(request, progress=show_progress())
    if options.json:
        print_json(measured)
        return EXIT_OK
    tell_evaluation(measured)
    return EXIT_OK


def backbones(options: argparse.Namespace) -> int:
    listed = [(one, bool(hub.here(one))) for one in KNOWN]
    if options.json:
        print_json({"backbones": [{**asdict(one), "cached": here} for one, here in listed]})
        return EXIT_OK
    rows = [("name", "download", "GFLOP", "licence", "here", "good for")]
    for one, here in listed:
        figures = (f"{one.megabytes} MB", f"{one.gflop}", str(one.licence), "yes" if here else "-")
        rows.append((one.shown, *figures, one.good_for))
    print(columns(rows))
    return EXIT_OK


def report(options: argparse.Namespace) -> int:
    refuse_ranks("report")
    prepare_torch(options)
    from model_store.tables import percent
    from trainer.progress import show_progress
    from trainer.report.report import write_report

    request = read_options(Report, options)
    written, paths = write_report(request, progress=show_progress())
    if options.json:
        print_json({**written, "paths": [str(path) for path in paths]})
        return EXIT_OK
    print(
        f"version {written['version']}, judged by {counted(written['images'], 'held-out image')}:"
    )
    print(f"accuracy {percent(written['accuracy']['all'])}; the report is in {paths[-1]}")
    return EXIT_OK


PATHS = {
    "data": "--data",
    "val_data": "--val-data",
    "checkpoint": "--checkpoint",
    "hierarchy": "--hierarchy",
    "file": "--pretrained",
    "sign": "--sign",
    "trust": "--trust",
    "store": "--store",
}
"""Options that name files, by their names in the result of argparse."""
_NOT_PATHS = {("hierarchy", "folders")}


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "a cluster", "Data and store must be where the cluster reads them by the same names."
    )
    group.add_argument(
        "--on",
        choices=["ray"],
        help="learn as a job of a Ray cluster, and follow it from here; Ctrl-C stops the job",
    )
    group.add_argument(
        "--ray-address",
        metavar="URL",
        default=os.environ.get("RAY_API_SERVER_ADDRESS") or "http://127.0.0.1:8265",
        help="address of the cluster's dashboard (default: $RAY_API_SERVER_ADDRESS, else "
        "http://127.0.0.1:8265)",
    )
    group.add_argument(
        "--ray-upload",
        action="store_true",
        help="send the folder of --data to the cluster with the job; 256 MiB at most",
    )


def sent_to_cluster(options: argparse.Namespace, arguments: Sequence[str]) -> Sent:
    """Describe the command for a cluster. `options` is what the arguments were parsed to."""
    from trainer.cluster import Sent

    if getattr(options, "alternate", []):
        raise WrongUsage(
            "--alternate cannot be sent to a cluster: make the store first, with `dne-store init "
            "--alternate`"
        )
    given = {name: getattr(options, name, None) for name in PATHS}
    paths = {
        PATHS[name]: str(value)
        for name, value in given.items()
        if value is not None and (name, value) not in _NOT_PATHS and not _is_name(name, value)
    }
    return Sent(
        words=tuple(_without_cluster_options(arguments)),
        paths=paths,
        store=options.store,
        upload=options.data if options.ray_upload else None,
        name=getattr(options, "name", None),
        threads=options.threads or 1,
        gpus=1 if options.device == "cuda" else 0,
    )


def _is_name(option: str, value: object) -> bool:
    """Return whether the cluster fetches the weights itself, by their name."""
    return option == "file" and backbone_named(str(value)) is not None


def _without_cluster_options(arguments: Sequence[str]) -> list[str]:
    known = argparse.ArgumentParser(add_help=False)
    add_cluster_options(known)
    return known.parse_known_args(arguments)[1]
