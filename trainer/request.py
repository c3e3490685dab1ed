"""Describe the requests of the trainer as plain data: one dataclass a command.

A sentence names a setting as Python has it, in backticks: `memory=statistics`. The command line
writes its option there.
"""

from __future__ import annotations

import math
import platform
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from model_store.errors import WrongUsage
from model_store.host.machine import usable_cores
from model_store.records.manifest import Manifest
from model_store.records.quality import TrainingRun
from model_store.records.signing import NO_KEYS, Keys
from model_store.spec import MAX_PLACES, MAX_TASKS, NetworkSpec, Stem, can_be_convolved
from model_store.worth import Kind

_HEADS_FROM_IMAGES = ((10_000, 4), (4_000, 2), (0, 1))
"""A later expert's heads, from this many images of its task on; see ADR 26."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    image_size: int
    patch_size: int
    depth: int
    heads: int
    stem: Stem


PRESETS = {
    "tiny": Preset(image_size=16, patch_size=4, depth=2, heads=4, stem="convolutions"),
    "small": Preset(image_size=64, patch_size=8, depth=5, heads=6, stem="convolutions"),
    "paper": Preset(image_size=32, patch_size=4, depth=5, heads=12, stem="patches"),
}
_DEFAULT_PRESET = "small"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """The sizes that are asked of the network. None: not asked."""

    preset: str | None = None
    image_size: int | None = None
    """Pixels of an image's side."""
    patch_size: int | None = None
    """Pixels of a patch's side."""
    depth: int | None = None
    head_width: int | None = None
    """Channels of an attention head."""
    stem: Stem | None = None
    heads: int | None = None
    """Attention heads of the new expert. A later task's are chosen by the number of its images."""

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise WrongUsage(f"preset {self.preset!r} is not one of {', '.join(PRESETS)}")

    def first_network(self) -> NetworkSpec:
        """Describe the network before its first task: a preset's sizes, and those given instead."""
        sizes = {**_sizes(self.preset or _DEFAULT_PRESET), **self._given()}
        halved = sizes["image_size"], sizes["patch_size"]
        if self.stem is None and not can_be_convolved(*map(int, halved)):
            sizes["stem"] = "patches"
        plain = NetworkSpec(**sizes)  # type: ignore[arg-type]
        if MAX_TASKS * plain.depth * plain.patches**2 > MAX_PLACES:
            return plain  # gated, it could not grow to all its tasks, with one head in each
        return replace(plain, attention="gated", qkv_bias=False)

    def check_agrees(self, lineage: NetworkSpec) -> None:
        """Refuse sizes that differ from the fixed ones; a later task may only repeat them. The stem
        of a preset is not asked for: that of the first task goes on."""
        preset = {} if self.preset is None else _sizes(self.preset)
        preset.pop("stem", None)
        for name, asked in {**preset, **self._given()}.items():
            fixed = getattr(lineage, name)
            if asked != fixed:
                setting = f"`{name}={asked}`"
                if name not in self._given():
                    setting = f"`preset={self.preset}` ({setting})"
                raise WrongUsage(
                    f"{setting} does not fit: the first task has fixed {name} {fixed} for this "
                    "model"
                )

    def heads_of_first(self) -> int:
        preset = PRESETS[self.preset or _DEFAULT_PRESET]
        return preset.heads if self.heads is None else self.heads

    def heads_of_later(self, *, images: int) -> int:
        """Choose the heads for a task of this many images, unless a number was asked for."""
        return heads_for(images) if self.heads is None else self.heads

    def _given(self) -> dict[str, int | str]:
        asked = asdict(self)
        del asked["preset"], asked["heads"]
        return {name: value for name, value in asked.items() if value is not None}


def heads_for(images: int) -> int:
    return next(heads for least, heads in _HEADS_FROM_IMAGES if images >= least)


def _sizes(preset: str) -> dict[str, int | str]:
    sizes = asdict(PRESETS[preset])
    del sizes["heads"]
    return sizes


Growth = Literal["auto", "quick", "adapt", "expert"]
"""How far a task may grow the network after its classes were added."""
ReadoutChoice = Literal["auto", "narrow", "wide"]
"""The last block of a pre-trained expert, earlier ones too, or what cross-validation says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedFile:
    """Pre-trained weights to begin with."""

    file: Path
    """A file, or a name: that of a known backbone, or owner/name on the Hugging Face Hub."""
    unfreeze_last: int = 0
    """The last blocks that the first task may change."""
    normalise: str | None = None
    """The normalisation that it was trained with. None: read from its files."""
    attention_heads: int | None = None
    """None: read from its files, or chosen by its width."""
    readout: ReadoutChoice = "auto"
    """The part of it that the classifier reads."""

    def __post_init__(self) -> None:
        if self.unfreeze_last < 0:
            raise WrongUsage(f"`unfreeze_last` must be 0 or more, not {self.unfreeze_last}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The length and rate of learning. None: chosen from the number of images and the width."""

    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        _refuse_not_above_0(self, "epochs", "batch_size", "learning_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """Limits that a version has to keep. Shares are between 0 and 1; None sets no limit."""

    max_drop: float = 0.02
    """The largest fall of accuracy on old classes."""
    min_new: float | None = None
    """The least accuracy on new classes. None: better than guessing."""
    min_gain: float = 0.01
    """The least gain of a version with an expert over the one without."""
    max_latency_ms: float | None = None
    """For one image on this machine."""
    max_bytes: int | None = None
    """Of all experts and the classifier."""
    force: bool = False
    """True: promote all the same, and record that it was forced."""

    def __post_init__(self) -> None:
        for name in ("max_drop", "min_new", "min_gain"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise WrongUsage(f"`{name}` must be between 0 and 100 %")
        _refuse_not_above_0(self, "max_latency_ms", "max_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The part that requests to learn a version have in common."""

    val_data: Path | None = None
    """Judge by these images, not by held-out ones."""
    skip_bad: bool = False
    promote: bool = True
    reason: str = ""
    checkpoint: Path | None = None
    """None: no checkpoint is kept. The command line has a default of its own."""
    tokens: Path | None = None
    """The folder of tokens that were read before; None: none are kept."""
    command: str = ""
    """The command line for the record of the version; empty where there was none."""
    measures_threads: bool = False
    """True: the first steps are timed to choose the number of CPU threads."""
    before_publish: Callable[[], None] | None = None
    """Called before the version is published and again before it is promoted. PicturesGone from it
    prevents both."""
    on_published: Callable[[Manifest], None] | None = None
    """Called with the version before it is promoted. An error from it prevents the promotion."""
    keys: Keys = NO_KEYS
    effort: Effort = field(default_factory=Effort)
    loss: str = "cross-entropy"
    augment: str = "auto"
    flip: bool | None = None
    memory: int | Literal["statistics"] = 2000
    """The exemplars to keep, over all classes. `statistics` keeps no picture at all."""
    seed: int = 0
    limits: GateLimits = field(default_factory=GateLimits)
    unknown_rate: float = 0.05
    """The share of known images that may be answered as unknown."""
    store: str
    alternate: Sequence[str] = ()
    """The stores from which a new store is to borrow experts."""
    channel: str = "production"
    device: str = "auto"
    actor: str = "unknown"

    def __post_init__(self) -> None:
        if self.exemplars < 0:
            raise WrongUsage(f"`memory` must be 0 or more, not {self.memory}")
        if not 0 <= self.seed < 2**63:
            raise WrongUsage(f"`seed` must be between 0 and 2^63, not {self.seed}")
        if not 0 < self.unknown_rate < 1:
            raise WrongUsage("`unknown_rate` must be between 0 and 100 %, and neither of them")

    @property
    def exemplars(self) -> int:
        """Return the number of exemplars to keep, over all classes."""
        return 0 if self.memory == "statistics" else self.memory

    @property
    def keeps_pictures(self) -> bool:
        """Return whether held-out images and exemplars may stay in the store."""
        return self.memory != "statistics"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddTask(Learning):
    """A request to learn a task: `dne-train add-task`."""

    data: Path
    name: str | None = None
    extend: bool = False
    """True: the data has more images of known classes."""
    hierarchy: str | None = None
    """A file of groups above the classes, or `folders`."""
    groups: Literal["folders"] | None = None
    """`folders`: images of a folder inside a class folder belong together."""
    grow: Growth | None = None
    """How far the network may grow after a version in seconds; None: auto."""
    quick: bool | None = None
    """True: `grow` is quick. False: it is expert."""
    grows_by_itself: bool = True
    """False: `auto` is quick."""
    shape: NetworkShape = field(default_factory=NetworkShape)
    pretrained: PretrainedFile | None = None
    from_scratch: bool = False
    """True: the first task is meant to begin without pre-trained weights."""

    @property
    def growth(self) -> Growth:
        """Return how far the task may grow the network; `quick` is another way to say it."""
        if self.quick is not None:
            return "quick" if self.quick else "expert"
        if self.grow in (None, "auto") and not self.grows_by_itself:
            return "quick"
        return self.grow or "auto"

    def __post_init__(self) -> None:
        Learning.__post_init__(self)
        if self.groups is not None and self.hierarchy == "folders":
            raise WrongUsage(
                "`hierarchy=folders` takes folders in folders for groups of classes, and "
                "`groups=folders` for groups of images: give one of the two"
            )
        if self.quick is not None and self.grow not in (None, self.growth):
            raise WrongUsage(
                f"`quick={self.quick}` is `grow={self.growth}`: `grow={self.grow}` does not fit it"
            )
        if self.extend and self.quick is not None:
            raise WrongUsage("`extend` adds no task: `quick=True` and `quick=False` do not fit it")
        if self.extend and self.grow is not None:
            raise WrongUsage("`extend` adds no task: `grow` does not fit it")
        if self.from_scratch and self.pretrained is not None:
            raise WrongUsage("`from_scratch` begins without weights: `pretrained` does not fit it")
        if self.quick and self.shape.heads is not None and self.pretrained is None:
            raise WrongUsage("`quick` adds no expert: `heads` does not fit it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deepen(Learning):
    """A request to grow the network for tasks that are there: `dne-train deepen`."""

    kind: Kind | None = None
    """None: an adapter, as long as no younger expert reads the first one."""
    heads: int | None = None
    if_needed: bool = False

    def __post_init__(self) -> None:
        Learning.__post_init__(self)
        if self.kind == "adapter" and self.heads is not None:
            raise WrongUsage("`kind=adapter` adds no expert: `heads` does not fit it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request to run jobs: `dne-train worker`."""

    once: bool = False
    poll_seconds: float = 1.0
    until_stdin_closes: bool = False
    checkpoint: Path | None = None
    memory: int | Literal["statistics"] = 2000
    limits: GateLimits = field(default_factory=GateLimits)
    keys: Keys = NO_KEYS
    store: str
    channel: str = "production"
    device: str = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.poll_seconds <= 3600:
            raise WrongUsage(f"`poll_seconds` must be between 0 and 3600, not {self.poll_seconds}")
        if self.keys.signer is not None and self.limits.force:
            raise WrongUsage(
                "a worker signs nothing that the gate refused: leave `force` out, and overrule the "
                "gate with `dne-train add-task --from-inbox --force`"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """A request to measure a version: `dne-train evaluate`."""

    data: Path
    version: int | None = None
    unknown_data: Path | None = None
    skip_bad: bool = False
    tokens: Path | None = None
    """The folder of tokens that were read before; None: none are kept."""
    store: str
    channel: str
    device: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A request to write a version's report: `dne-train report`."""

    version: int
    out: Path
    store: str
    device: str = "auto"


def _refuse_not_above_0(asked: Effort | GateLimits, *names: str) -> None:
    for name in names:
        value = getattr(asked, name)
        if value is not None and not 0 < value < math.inf:
            raise WrongUsage(f"`{name}` must be more than 0, not {value}")


MAX_TEXT = 2000
"""Characters that a record takes."""
_NOT_TOLD = ("--store", "--checkpoint", "--sign", "--trust", "--reason", "--ray-address")
"""Options that say where things are kept, or that a channel record has."""


def command_of(arguments: Sequence[str]) -> str:
    """Write a command line for the record: of folders, files and addresses the last name only."""
    told = " ".join(shlex.quote(part) for part in _told(arguments))
    return f"dne-train {told}"[:MAX_TEXT]


def _told(arguments: Sequence[str]) -> Iterator[str]:
    left = iter(arguments)
    for part in left:
        name, equals, value = part.partition("=")
        if not part.startswith("--"):
            yield _last_name(part)
        elif any(hidden.startswith(name) for hidden in _NOT_TOLD):  # argparse takes a beginning too
            if not equals:
                next(left, None)
        else:
            yield f"{name}={_last_name(value)}" if equals else part


def _last_name(value: str) -> str:
    """Shorten a path or an address, of which a query may hold a key."""
    if "/" not in value and "\\" not in value:
        return value
    bare = value.partition("?")[0] if "://" in value else value
    return re.split(r"[/\\]", bare.rstrip("/\\"))[-1] or "."


def training_run(
    request: Learning, *, seconds: float, device: str, latency_ms: float | None
) -> TrainingRun:
    return TrainingRun(
        command=request.command,
        seed=request.seed,
        seconds=round(seconds, 3),
        machine=_machine(device),
        latency_ms=latency_ms,
    )


def _machine(device: str) -> str:
    """Name the processor, never the host or its user."""
    processor = platform.machine() or "unknown processor"
    with suppress(OSError):  # only Linux has the file
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        processor = found[1].strip() if found else processor
    cores = usable_cores()
    return f"{processor}, {cores} core{'' if cores == 1 else 's'}, {device}"[:MAX_TEXT]
