"""Describe the requests of `dne-train`: one dataclass a command, whose fields are its options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from model_store.cli.command import add_sign_option, version_number
from model_store.errors import WrongUsage
from model_store.records.manifest import Manifest, Signs
from trainer.options import described, memory_size, option, points, share
from trainer.presets import NetworkShape

DATA = (
    "a folder of images for each class; or train and val folders, a zip or tar, CSV, JSONL, COCO's "
    "JSON, or parquet"
)
PRETRAINED = "a pre-trained start (first task only)"
_pretrained = partial(option, group=PRETRAINED)
_learning = partial(option, group="learning")
_gate = partial(option, group="the gate")


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedFile:
    """A pre-trained file to begin with."""

    file: Path = field(
        metadata=described(
            "begin with the weights of a vision transformer: safetensors, or their index",
            name="--pretrained",
            group=PRETRAINED,
            metavar="FILE",
        )
    )
    unfreeze_last: int = _pretrained(
        0, "let the first task change its last N blocks (default: 0, none of it)", metavar="N"
    )
    normalise: str | None = _pretrained(
        None,
        "what it was trained with: imagenet, half or M,M,M/S,S,S (default: by its files)",
        metavar="HOW",
    )
    attention_heads: int | None = _pretrained(
        None,
        "how many it has (default: by config.json, or the custom of its width)",
        metavar="N",
    )

    def __post_init__(self) -> None:
        if self.unfreeze_last < 0:
            raise WrongUsage(f"--unfreeze-last must be 0 or more, not {self.unfreeze_last}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The length and rate of learning. None: chosen from the number of images and the width."""

    epochs: int | None = _learning(None, "default: by the data's size", metavar="N")
    batch_size: int | None = _learning(None, "images a step", metavar="N")
    learning_rate: float | None = _learning(None, "default: by the width", metavar="R")

    def __post_init__(self) -> None:
        _refuse_not_above_0(self, "epochs", "batch_size", "learning_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """Limits that a version has to keep. Shares are between 0 and 1; None sets no limit."""

    max_drop: float = _gate(
        0.02,
        "how far accuracy on old classes may fall, in points of 100; a fall that may be "
        "chance is let pass (default: 2)",
        metavar="POINTS",
        type=points,
    )
    min_new: float | None = _gate(
        None,
        "least accuracy on new classes: 0.8 or 80%% (default: better than guessing)",
        metavar="SHARE",
        type=share,
    )
    min_gain: float = _gate(
        0.01,
        "how much better a version with an expert must be than the one without, in points of "
        "100, beyond chance (default: 1)",
        metavar="POINTS",
        type=points,
    )
    max_latency_ms: float | None = _gate(
        None, "for one image, measured on this machine", metavar="MS"
    )
    max_bytes: int | None = _gate(None, "size of all experts and the classifier", metavar="N")
    force: bool = _gate(False, "promote all the same, and record that it was forced")

    def __post_init__(self) -> None:
        for name in ("max_drop", "min_new", "min_gain"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise WrongUsage(f"--{name.replace('_', '-')} must be between 0 and 100 %")
        _refuse_not_above_0(self, "max_latency_ms", "max_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The part that requests to learn a version have in common."""

    val_data: Path | None = option(
        None, "judge by these images, not by held-out ones; forms as of --data", metavar="DATA"
    )
    skip_bad: bool = option(False, "go on without unreadable images")
    promote: bool = option(
        True, "publish only; the channel does not move", name="--no-promote", action="store_false"
    )
    reason: str = option("", "why, for the channel's history", metavar="T")
    checkpoint: Path | None = option(
        None,
        "where the run is kept each epoch, so that the same command goes on after an "
        "interruption (default: below $XDG_CACHE_HOME/dne-serve)",
        metavar="DIR",
    )
    """None: no checkpoint is kept. The command line has a default of its own."""
    tokens: Path | None = None
    """The folder of tokens that were read before; None: none are kept."""
    command: str = ""
    """The command line for the record of the version; empty where there was none."""
    measures_threads: bool = False
    """True: the first steps are timed to choose the number of CPU threads."""
    on_published: Callable[[Manifest], None] | None = None
    """Called with the version before it is promoted. An error from it prevents the promotion."""
    signer: Signs | None = field(default=None, metadata={"add": add_sign_option})
    effort: Effort = field(default_factory=Effort)
    loss: str = _learning(
        "cross-entropy",
        "what classification is trained with (default: {default})",
        choices=["cross-entropy", "binary"],
    )
    augment: str = _learning(
        "auto",
        "random changes to training images: standard is crop, flip and RandAugment; light is "
        "crop; auto (the default) is standard, light for images under 32 pixels, and crop and "
        "flip after a pre-trained start",
        choices=["auto", "standard", "light", "none"],
    )
    flip: bool | None = _learning(
        None, "mirror images at random, or never (letters, signs); default: by --augment"
    )
    memory: int | Literal["statistics"] = _learning(
        2000,
        "exemplars kept in all, over all classes; 0 keeps none; `statistics` keeps no picture at "
        "all, held-out ones included, and needs a pre-trained start (default: {default})",
        metavar="N",
        type=memory_size,
    )
    seed: int = _learning(0, "makes a run repeatable (default: {default})", metavar="N")
    limits: GateLimits = field(default_factory=GateLimits)
    unknown_rate: float = _gate(
        0.05,
        "share of known images that may be answered as unknown: 0.05 or 5%% (the default)",
        metavar="SHARE",
        type=share,
    )
    store: str
    channel: str = "production"
    device: str = "auto"
    actor: str = "unknown"

    def __post_init__(self) -> None:
        if self.exemplars < 0:
            raise WrongUsage(f"--memory must be 0 or more, not {self.memory}")
        if not 0 <= self.seed < 2**63:
            raise WrongUsage(f"--seed must be between 0 and 2^63, not {self.seed}")
        if not 0 < self.unknown_rate < 1:
            raise WrongUsage("--unknown-rate must be between 0 and 100 %, and neither of them")

    @property
    def exemplars(self) -> int:
        """Return the number of exemplars to keep, over all classes."""
        return 0 if self.memory == "statistics" else self.memory

    @property
    def keeps_pictures(self) -> bool:
        """Tell whether held-out images and exemplars may stay in the store."""
        return self.memory != "statistics"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddTask(Learning):
    """A request to learn a task: `dne-train add-task`."""

    data: Path = field(
        metadata=described(f"{DATA}, unless --from-inbox", metavar="DATA", required=False)
    )
    name: str | None = option(None, "the task's name (default: that of DATA)", metavar="N")
    extend: bool = option(
        False, "DATA has more images of classes that are known: tune the classifier, add no expert"
    )
    hierarchy: str | None = option(
        None,
        "groups above the classes, which answer where the class is in doubt: a YAML file with "
        "lines such as `puma: cat`, or `folders` for folders in folders",
        metavar="FILE",
    )
    quick: bool | None = option(
        None,
        "after a pre-trained start: add a classifier only, in seconds (the default), or learn an "
        "expert after it, which is promoted if it earns its cost",
    )
    shape: NetworkShape = field(default_factory=NetworkShape)
    pretrained: PretrainedFile | None = None

    def __post_init__(self) -> None:
        Learning.__post_init__(self)
        if self.extend and self.quick is not None:
            raise WrongUsage("--extend adds no task: --quick and --no-quick do not fit it")
        if self.quick and self.shape.heads is not None and self.pretrained is None:
            raise WrongUsage("--quick adds no expert: --heads does not fit it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deepen(Learning):
    """A request to learn an expert for tasks that have none: `dne-train deepen`."""

    heads: int | None = option(
        None,
        "attention heads of the expert (default: 1, 2 or 4 by the number of images)",
        metavar="K",
    )
    if_needed: bool = option(
        False,
        "end with 0 if no task lacks an expert, or if this expert was learnt before and was not "
        "promoted: for commands that run by the clock",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request to run jobs: `dne-train worker`."""

    once: bool = option(False, "run the jobs that wait, and end (default: wait for more)")
    poll_seconds: float = option(
        1.0, "time between two looks for a job (default: {default})", metavar="S"
    )
    until_stdin_closes: bool = option(
        False, "end when standard input is closed, as it is when the parent process dies"
    )
    checkpoint: Path | None = option(
        None,
        "where a run is kept each epoch, so that the next worker on this machine goes on "
        "(default: below $XDG_CACHE_HOME/dne-serve)",
        metavar="DIR",
    )
    memory: int | Literal["statistics"] = _learning(
        2000, "as of add-task (default: {default})", metavar="N", type=memory_size
    )
    limits: GateLimits = field(default_factory=GateLimits)
    sign: Path | None = field(default=None, metadata={"add": add_sign_option})
    store: str
    channel: str = "production"
    device: str = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.poll_seconds <= 3600:
            raise WrongUsage(f"--poll-seconds must be between 0 and 3600, not {self.poll_seconds}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """A request to measure a version: `dne-train evaluate`."""

    data: Path = field(metadata=described(DATA, metavar="DATA"))
    version: int | None = option(
        None, "default: what the channel names", metavar="N", type=version_number
    )
    unknown_data: Path | None = option(
        None,
        "images of no class of the model: how well they are told from those in --data",
        metavar="DATA",
    )
    skip_bad: bool = option(False, "go on without unreadable images")
    tokens: Path | None = None
    """The folder of tokens that were read before; None: none are kept."""
    store: str
    channel: str
    device: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A request to write a version's report: `dne-train report`."""

    version: int = field(
        metadata=described(
            "the number of the version", name="version", metavar="N", type=version_number
        )
    )
    out: Path = field(metadata=described("where to write it", metavar="DIR"))
    store: str
    device: str = "auto"


def _refuse_not_above_0(asked: Effort | GateLimits, *names: str) -> None:
    for name in names:
        value = getattr(asked, name)
        if value is not None and not 0 < value < math.inf:
            raise WrongUsage(f"--{name.replace('_', '-')} must be more than 0, not {value}")
