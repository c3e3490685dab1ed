"""Declare the options of `dne-train`, and their help.

An option that is not given is absent from the result of argparse: the dataclasses of
`trainer.request` hold all defaults. The name in the result is the name of a field there.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from model_store.cli.command import (
    add_alternate_option,
    add_json_option,
    add_key_options,
    add_store_option,
    version_number,
)
from model_store.spec import Stem
from model_store.worth import Kind
from trainer.backbones.known import FIRST
from trainer.request import PRESETS, Growth, Learning, ReadoutChoice, Work

DATA = (
    "a folder of images for each class; or train and val folders, a zip or tar, CSV, JSONL, COCO's "
    "JSON, or parquet"
)
Options = argparse.ArgumentParser | argparse._ArgumentGroup


def add_add_task_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from-inbox",
        action="store_true",
        help="learn from all labels of the store's inbox that no version has used: known classes "
        "are extended, and new names become a task",
    )
    _add_common_options(parser)
    add_key_options(parser)
    _add_task_options(parser)
    _add_learning_options(parser)
    _add_gate_options(parser, unknown_rate=True)
    _add_network_options(parser)
    _add_pretrained_options(parser)
    _add_processes_option(parser)


def add_deepen_options(parser: argparse.ArgumentParser) -> None:
    _add_common_options(parser)
    add_key_options(parser)
    add = _adder(parser)
    add(
        "--kind",
        choices=get_args(Kind),
        help="adapter changes the pre-trained expert in its place, which costs no time afterwards; "
        "dense adds an expert that reads it (default: adapter, as long as no younger expert reads "
        "the pre-trained one)",
    )
    add(
        "--heads",
        metavar="K",
        type=int,
        help="attention heads of a dense expert (default: 1, 2 or 4 by the number of images)",
    )
    add(
        "--if-needed",
        action="store_true",
        help="end with 0 if no task lacks an expert, or if this expert was learnt before and was "
        "not promoted: for commands that run by the clock",
    )
    _add_learning_options(parser)
    _add_gate_options(parser, unknown_rate=True)
    _add_processes_option(parser)


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    add = _adder(parser)
    add(
        "--once",
        action="store_true",
        help="run the jobs that wait, and end (default: wait for more)",
    )
    add(
        "--poll-seconds",
        metavar="S",
        type=float,
        help=f"time between two looks for a job (default: {_default(Work, 'poll_seconds')})",
    )
    add(
        "--until-stdin-closes",
        action="store_true",
        help="end when standard input is closed, as it is when the parent process dies",
    )
    add(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        help="where a run is kept each epoch, so that the next worker on this machine goes on "
        "(default: below $XDG_CACHE_HOME/dne-serve)",
    )
    learning = parser.add_argument_group("learning")
    _add_memory(learning, f"as of add-task (default: {_default(Work, 'memory')})")
    _add_gate_options(parser, unknown_rate=False)
    add_key_options(parser)


def add_evaluate_options(parser: argparse.ArgumentParser) -> None:
    add = _adder(parser)
    add("--data", metavar="DATA", type=Path, required=True, help=DATA)
    add("--version", metavar="N", type=version_number, help="default: what the channel names")
    add(
        "--unknown-data",
        metavar="DATA",
        type=Path,
        help="images of no class of the model: how well they are told from those in --data",
    )
    _add_skip_bad(parser)


def add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "version", metavar="N", type=version_number, help="the number of the version"
    )
    _adder(parser)("--out", metavar="DIR", type=Path, required=True, help="where to write it")


def _add_processes_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        metavar="N",
        type=int,
        help="learn in N processes on this machine; torchrun starts them on several (default: 1)",
    )


def add_running_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command has."""
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default=os.environ.get("DNE_DEVICE") or "auto",
        help="where to compute (default: a GPU when there is one)",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=int,
        help="CPU threads (default: one for each core, or fewer if the first steps are faster so)",
    )
    add_store_option(parser)
    add_json_option(parser)


def _add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options outside any group that all commands which learn a version have."""
    add = _adder(parser)
    add(
        "--val-data",
        metavar="DATA",
        type=Path,
        help="judge by these images, not by held-out ones; forms as of --data",
    )
    _add_skip_bad(parser)
    add(
        "--no-promote",
        dest="promote",
        action="store_false",
        help="publish only; the channel does not move",
    )
    add("--reason", metavar="T", help="why, for the channel's history")
    add(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        help="where the run is kept each epoch, so that the same command goes on after an "
        "interruption (default: below $XDG_CACHE_HOME/dne-serve)",
    )


def _add_task_options(parser: argparse.ArgumentParser) -> None:
    add = _adder(parser)
    add("--data", metavar="DATA", type=Path, help=f"{DATA}, unless --from-inbox")
    add("--name", metavar="N", help="the task's name (default: that of DATA)")
    add_alternate_option(parser)
    add(
        "--extend",
        action="store_true",
        help="DATA has more images of classes that are known: tune the classifier, add no expert",
    )
    add(
        "--hierarchy",
        metavar="FILE",
        help="groups above the classes, which answer where the class is in doubt: a YAML file with "
        "lines such as `puma: cat`, or `folders` for folders in folders",
    )
    add(
        "--groups",
        choices=["folders"],
        help="`folders`: the folders in a class folder hold images that belong together, such as "
        "frames of one film; they are learnt or held out together, as are nearly equal images",
    )
    add(
        "--grow",
        choices=get_args(Growth),
        help="after a pre-trained start, how far the network may grow after a version in seconds: "
        "quick adds a classifier only, adapt changes the pre-trained expert, expert adds one; auto "
        "(the default) adapts where cross-validation says that there is something to win. What is "
        "grown is promoted if it earns its cost",
    )
    add(
        "--quick",
        action=argparse.BooleanOptionalAction,
        help="--quick is --grow quick, and --no-quick is --grow expert",
    )
    add(
        "--heads",
        metavar="K",
        type=int,
        help="attention heads of the new expert (later tasks: 1, 2 or 4 by the number of images)",
    )


def _add_learning_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("learning")
    add = _adder(group)
    add("--epochs", metavar="N", type=int, help="default: by the data's size")
    add("--batch-size", metavar="N", type=int, help="images a step")
    add("--learning-rate", metavar="R", type=float, help="default: by the width")
    add(
        "--loss",
        choices=["cross-entropy", "binary"],
        help=f"what classification is trained with (default: {_default(Learning, 'loss')})",
    )
    add(
        "--augment",
        choices=["auto", "standard", "light", "none"],
        help="random changes to training images: standard is crop, flip and RandAugment; light is "
        "crop; auto (the default) is standard, light for images under 32 pixels, and crop and "
        "flip in fewer than 100 epochs and after a pre-trained start",
    )
    add(
        "--flip",
        action=argparse.BooleanOptionalAction,
        help="mirror images at random, or never (letters, signs); default: by --augment",
    )
    _add_memory(
        group,
        "exemplars kept in all, over all classes; 0 keeps none; `statistics` keeps no picture at "
        "all, held-out ones included, and needs a pre-trained start "
        f"(default: {_default(Learning, 'memory')})",
    )
    add(
        "--seed",
        metavar="N",
        type=int,
        help=f"makes a run repeatable (default: {_default(Learning, 'seed')})",
    )


def _add_gate_options(parser: argparse.ArgumentParser, *, unknown_rate: bool) -> None:
    group = parser.add_argument_group(
        "the gate", "A version that breaks one of these is published and not promoted (exit 3)."
    )
    add = _adder(group)
    add(
        "--max-drop",
        metavar="POINTS",
        type=points,
        help="how far accuracy on old classes may fall, in points of 100; a fall that may be "
        "chance is let pass (default: 2)",
    )
    add(
        "--min-new",
        metavar="SHARE",
        type=share,
        help="least accuracy on new classes: 0.8 or 80%% (default: better than guessing)",
    )
    add(
        "--min-gain",
        metavar="POINTS",
        type=points,
        help="how much better a version with an expert must be than the one without, in points of "
        "100, beyond chance (default: 1)",
    )
    add(
        "--max-latency-ms",
        metavar="MS",
        type=float,
        help="for one image, measured on this machine",
    )
    add("--max-bytes", metavar="N", type=int, help="size of all experts and the classifier")
    add("--force", action="store_true", help="promote all the same, and record that it was forced")
    if unknown_rate:
        add(
            "--unknown-rate",
            metavar="SHARE",
            type=share,
            help="share of known images that may be answered as unknown: 0.05 or 5%% (the default)",
        )


def _add_network_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "the network (fixed by the first task)", "Later tasks may repeat these, not change them."
    )
    add = _adder(group)
    add("--preset", choices=list(PRESETS), help="sizes to start from (small)")
    add("--image-size", metavar="N", type=int, help="pixels of an image's side")
    add("--patch-size", metavar="N", type=int, help="pixels of a patch's side")
    add(
        "--stem",
        choices=get_args(Stem),
        help="embed each patch by itself, or by convolutions that halve the image, which learn "
        "faster (the presets tiny and small)",
    )
    add("--depth", metavar="N", type=int, help="patch blocks")
    add("--head-width", metavar="N", type=int, help="channels of an attention head")


def _add_pretrained_options(parser: argparse.ArgumentParser) -> None:
    add = _adder(parser.add_argument_group("a pre-trained start (first task only)"))
    add(
        "--pretrained",
        dest="file",
        metavar="NAME",
        type=Path,
        help=f"begin with the weights of a vision transformer: {FIRST.name} and others that "
        "`dne-train backbones` lists, owner/name on the Hugging Face Hub, or a safetensors file",
    )
    add(
        "--from-scratch",
        action="store_true",
        help="begin without: of use with hundreds of images a class, and for images unlike photos",
    )
    add(
        "--unfreeze-last",
        metavar="N",
        type=int,
        help="let the first task change its last N blocks (default: 0, none of it)",
    )
    add(
        "--normalise",
        metavar="HOW",
        help="what it was trained with: imagenet, half or M,M,M/S,S,S (default: by its files)",
    )
    add(
        "--attention-heads",
        metavar="N",
        type=int,
        help="how many it has (default: by config.json, or the custom of its width)",
    )
    add(
        "--readout",
        choices=get_args(ReadoutChoice),
        help="what the classifier reads of it: narrow, the last block; wide, earlier blocks and "
        "places in the picture too, for images that are not ordinary photos; auto (the default), "
        "by cross-validation of the first task",
    )


def _add_skip_bad(parser: Options) -> None:
    _adder(parser)("--skip-bad", action="store_true", help="go on without unreadable images")


def _add_memory(group: Options, help: str) -> None:
    _adder(group)("--memory", metavar="N", type=_memory_size, help=help)


def _adder(group: Options) -> partial[argparse.Action]:
    return partial(group.add_argument, default=argparse.SUPPRESS)


def _default(kind: type[Any], name: str) -> object:
    return next(field.default for field in fields(kind) if field.name == name)


def share(text: str) -> float:
    """Read a share: 0.8, 80% and 80 are the same, because a share above 1 is meant in percent."""
    value = _number(text, expected="a share: give 0.8 or 80%")
    return value / 100 if text.endswith("%") or value > 1 else value


def points(text: str) -> float:
    return _number(text, expected="a number of points: give 2 or 0.5") / 100


def _memory_size(text: str) -> int | Literal["statistics"]:
    """Read a number of exemplars, or the word for keeping none and no held-out image."""
    if text == "statistics":
        return "statistics"
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of exemplars nor the word statistics"
        ) from error


def _number(text: str, *, expected: str) -> float:
    try:
        return float(text.removesuffix("%"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from error
