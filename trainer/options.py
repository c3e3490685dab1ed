"""The options of dne-train, in the groups that its help shows."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from model_store.cli.command import add_json_option, add_store_option
from trainer.learning.presets import PRESETS


def size_options(one: argparse.ArgumentParser) -> None:
    sizes = one.add_argument_group(
        "the network (fixed by the first task)", "Later tasks may repeat these, not change them."
    )
    sizes.add_argument("--preset", choices=list(PRESETS), help="sizes to start from (small)")
    for name, what in (
        ("image-size", "pixels of an image's side"),
        ("patch-size", "pixels of a patch's side"),
        ("depth", "patch blocks"),
        ("head-width", "channels of an attention head"),
    ):
        sizes.add_argument(f"--{name}", metavar="N", type=int, help=what)
    one.add_argument(
        "--heads",
        metavar="K",
        type=int,
        help="attention heads of the new expert (later tasks: 1, 2 or 4 by the number of images)",
    )


def pretrained_options(one: argparse.ArgumentParser) -> None:
    given = one.add_argument_group("a pre-trained start (first task only)")
    given.add_argument(
        "--pretrained",
        metavar="FILE",
        type=Path,
        help="begin with the weights of a vision transformer: safetensors, in timm's names",
    )
    given.add_argument(
        "--unfreeze-last",
        metavar="N",
        type=int,
        help="let the first task change its last N blocks (default: 0, none of it)",
    )
    given.add_argument(
        "--normalise",
        metavar="HOW",
        help="what it was trained with: imagenet, half or M,M,M/S,S,S (default: half)",
    )
    given.add_argument(
        "--attention-heads",
        metavar="N",
        type=int,
        help="how many it has, which no file says (default: by the custom of its width)",
    )


def learning_options(one: argparse.ArgumentParser) -> None:
    learning = one.add_argument_group("learning")
    learning.add_argument("--epochs", metavar="N", type=int, help="default: by the data's size")
    learning.add_argument("--batch-size", metavar="N", type=int, help="images a step")
    learning.add_argument("--learning-rate", metavar="R", type=float, help="default: by the width")
    learning.add_argument(
        "--loss",
        choices=["cross-entropy", "binary"],
        default="cross-entropy",
        help="what classification is trained with (default: %(default)s)",
    )
    learning.add_argument(
        "--augment",
        choices=["auto", "standard", "light", "none"],
        default="auto",
        help="random changes to training images: standard is crop, flip and RandAugment; light is "
        "crop; auto (the default) is standard, light for images under 32 pixels, and crop and flip "
        "after a pre-trained start",
    )
    learning.add_argument(
        "--flip",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="mirror images at random, or never (letters, signs); default: by --augment",
    )
    learning.add_argument(
        "--memory",
        metavar="N",
        type=int,
        default=2000,
        help="exemplars kept in all, over all classes; 0 keeps none (default: %(default)s)",
    )
    learning.add_argument(
        "--seed", metavar="N", type=int, default=0, help="makes a run repeatable (default: 0)"
    )


def gate_options(one: argparse.ArgumentParser) -> None:
    gate = one.add_argument_group(
        "the gate", "A version that breaks one of these is published and not promoted (exit 3)."
    )
    gate.add_argument(
        "--max-drop",
        metavar="POINTS",
        type=_points,
        default=0.02,
        help="how far accuracy on old classes may fall, in points of 100; a fall that may be "
        "chance is let pass (default: 2)",
    )
    gate.add_argument(
        "--min-new",
        metavar="SHARE",
        type=_share,
        help="least accuracy on new classes: 0.8 or 80%% (default: better than guessing)",
    )
    gate.add_argument(
        "--max-latency-ms", metavar="MS", type=float, help="for one image, measured on this machine"
    )
    gate.add_argument(
        "--max-bytes", metavar="N", type=int, help="size of all experts and the classifier"
    )
    gate.add_argument(
        "--force", action="store_true", help="promote all the same, and record that it was forced"
    )
    gate.add_argument(
        "--unknown-rate",
        metavar="SHARE",
        type=_share,
        default=0.05,
        help="share of known images that may be answered as unknown: 0.05 or 5%% (the default)",
    )


def _share(text: str) -> float:
    """0.8, 80% and 80 are the same: a share above 1 can only be meant in percent."""
    value = _number(text, expected="a share: give 0.8 or 80%")
    return value / 100 if text.endswith("%") or value > 1 else value


def _points(text: str) -> float:
    return _number(text, expected="a number of points: give 2 or 0.5") / 100


def _number(text: str, *, expected: str) -> float:
    try:
        return float(text.removesuffix("%"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from error


def running_options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default=os.environ.get("DNE_DEVICE") or "auto",
        help="where to compute (default: a GPU when there is one)",
    )
    one.add_argument("--threads", metavar="N", type=int, help="CPU threads (default: torch's)")
    add_store_option(one)
    add_json_option(one)
