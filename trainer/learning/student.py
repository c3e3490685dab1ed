"""Make the student: the parent's network with one expert more, before the expert has learnt.

The first student is a network of a preset's sizes, or one around a pre-trained expert.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from model_store.codec import load_network
from model_store.errors import WrongUsage
from model_store.inference.fold import FoldedExpert, fold_expert
from model_store.inference.forward import Lineage
from model_store.inference.stacks import stack_up
from model_store.names import new_name, spelt_among
from model_store.network.device import choose_device
from model_store.network.expert import Expert
from model_store.network.network import Network
from model_store.records.manifest import Preprocessing, Scalar
from model_store.spec import ExpertSpec, NetworkSpec, TaskSpec
from model_store.tables import counted
from trainer.backbones.pretrained import Pretrained, read_pretrained
from trainer.backbones.settings import Triple
from trainer.backbones.shapes import HALF, IMAGENET
from trainer.base import Base
from trainer.data.folders import Listing
from trainer.data.sources.place import name_of
from trainer.learning.losses import Teacher
from trainer.presets import NetworkShape
from trainer.progress import Progress
from trainer.request import AddTask, Learning, PretrainedFile
from trainer.tokens.cache import TokenCache
from trainer.tokens.statistics import ClassStatistics

Aim = Literal["expert", "head", "extension", "deepening"]
"""A student adds one of these: a task with its expert; a task with a head only; more images of
known classes; an expert for tasks that have none."""

NORMALISATIONS: dict[str, tuple[Triple, Triple]] = {"half": HALF, "imagenet": IMAGENET}


@dataclass(frozen=True, slots=True, kw_only=True)
class Student:
    """The network that learns."""

    network: Network
    aim: Aim
    preprocessing: Preprocessing
    new_classes: tuple[str, ...]
    """The classes to learn; in an extension, known classes with more images; in a deepening, the
    classes of the tasks that get an expert."""
    before: nn.ModuleList | None = None
    """The parent's heads; None for a first version."""
    origin: dict[str, Scalar] = field(default_factory=dict)
    """The source of the newest expert's weights, for the record; empty for random weights."""
    frozen: tuple[FoldedExpert, ...] = ()
    """The experts that do not learn, folded once for all passes over images."""

    @property
    def on_pretrained(self) -> bool:
        return self.network.spec.is_pretrained

    @property
    def knows_all(self) -> bool:
        """Tell whether the parent answers every class: then each has to be as good as before."""
        return self.aim in ("extension", "deepening")

    @property
    def adds_expert(self) -> bool:
        return self.aim in ("expert", "deepening")

    @property
    def teacher(self) -> Teacher | None:
        """Return the part of the parent that an expert has to agree with: its older classes."""
        if self.before is None:
            return None
        spec = self.network.spec
        taught = spec.tasks[: len(self.before)]
        if self.aim == "deepening":
            taught = spec.tasks[: -len(spec.tasks_of_newest_expert)]
        return Teacher(
            heads=self.before[: len(taught)],
            classes=sum(len(task.classes) for task in taught),
        )

    @property
    def given(self) -> list[nn.Parameter]:
        """List the parameters that came from a file: they are near their goal already."""
        return self.network.newest.learnable() if self.origin else []

    @property
    def learns_by_steps(self) -> bool:
        """Tell whether an expert learns, or heads on features that no convex fit is made for."""
        if self.adds_expert:
            return bool(self.network.newest.learnable())
        return not self.on_pretrained

    def lineage(self) -> Lineage:
        """Fold the experts that learn, as they are, and put them after the frozen ones."""
        spec, begin = self.network.spec, len(self.frozen)
        return _lineage(spec, (*self.frozen, *_fold(self.network, begin, len(spec.experts))))

    def frozen_lineage(self) -> Lineage | None:
        """Stack the frozen experts, if there are any: they answer alike in every step."""
        if not self.frozen:
            return None
        return _lineage(self.network.spec.until(len(self.frozen)), self.frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """The outcome of learning, besides the weights."""

    training: Mapping[str, Scalar] = field(default_factory=dict)
    """The figures of the run, for the record."""
    statistics: Mapping[str, ClassStatistics] = field(default_factory=dict)
    """Those of the classes that have new images; empty without a pre-trained start."""
    tokens_NW: NDArray[np.float32] | None = None
    """The tokens that the classifier was fitted to, stand-ins included, and their classes."""
    labels_N: NDArray[np.int64] | None = None
    real_N: NDArray[np.bool_] | None = None
    """False for stand-ins."""
    fitted_on: int = 0
    """The number of images that gave the classifier a temperature of its own; 0 without one, and
    where a sample of them gave it."""
    cache: TokenCache | None = None
    """The tokens that were read, if any were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The network that the first task adds its classes to."""

    geometry: NetworkSpec
    expert: ExpertSpec
    preprocessing: Preprocessing
    weights: Pretrained | None = None
    unfreeze_last: int = 0

    def give(self, expert: Expert) -> None:
        """Put the pre-trained weights, if there are any, into the first expert."""
        if self.weights is not None:
            self.weights.load_into(expert, geometry=self.geometry)
            expert.fix(but_last=self.unfreeze_last)


def make_student(base: Base, *, request: AddTask, new: Listing, progress: Progress) -> Student:
    new_classes, images = new.names, new.images
    if request.extend:
        return _make_extending(base, request=request, classes=new_classes)
    if base.parent is None:
        return _make_first(base, request=request, classes=new_classes, progress=progress)
    request.shape.check_agrees(base.parent.spec)
    network = load_network(base.read_shard, base.parent)
    # The old experts stay in the network, so the old heads are all that is left to keep.
    before, expert = network.heads, None
    if not network.spec.is_pretrained or base.lacks_images:
        expert = ExpertSpec(heads=request.shape.heads_of_later(images=images))
    torch.manual_seed(request.seed)
    network.expand(TaskSpec(name=_task_name(base, request), classes=new_classes, expert=expert))
    network.to(choose_device(request.device))
    return Student(
        network=network,
        aim="expert" if expert else "head",
        before=before.to(network.device),
        preprocessing=base.parent.preprocessing,
        new_classes=new_classes,
        frozen=_fold(network, 0, len(base.parent.experts)),
    )


def make_deepening(base: Base, *, heads: int, request: Learning) -> Student:
    """Load the parent's network, and give its tasks without an expert one of so many heads."""
    assert base.parent is not None
    network = load_network(base.read_shard, base.parent)
    before, device = network.heads, choose_device(request.device)
    torch.manual_seed(request.seed)
    network.deepen(ExpertSpec(heads=heads))
    network.begin_heads_of_newest()
    network.to(device)
    return Student(
        network=network,
        aim="deepening",
        before=before.to(device),
        preprocessing=base.parent.preprocessing,
        new_classes=network.spec.classes_of_newest_expert,
        frozen=_fold(network, 0, len(base.parent.experts)),
    )


def _make_first(
    base: Base, *, request: AddTask, classes: tuple[str, ...], progress: Progress
) -> Student:
    start = start_of(request, progress=progress)
    network = Network(start.geometry)
    torch.manual_seed(request.seed)
    network.expand(TaskSpec(name=_task_name(base, request), classes=classes, expert=start.expert))
    start.give(network.newest)
    return Student(
        network=network.to(choose_device(request.device)),
        aim="expert",
        preprocessing=start.preprocessing,
        new_classes=classes,
        origin=_origin(start),
    )


def _origin(start: Start) -> dict[str, Scalar]:
    if start.weights is None:
        return {}
    return {"pretrained": start.weights.sha256, "unfrozen_blocks": start.unfreeze_last}


def _make_extending(base: Base, *, request: AddTask, classes: tuple[str, ...]) -> Student:
    """Load the parent's network; only its heads will change."""
    if base.parent is None:
        raise WrongUsage("--extend needs a version to extend, and the store has none")
    if request.name is not None or request.shape.heads is not None:
        raise WrongUsage("--extend adds neither task nor expert: --name and --heads do not fit it")
    request.shape.check_agrees(base.parent.spec)
    device = choose_device(request.device)
    network = load_network(base.read_shard, base.parent).to(device)
    before = copy.deepcopy(network.heads)
    network.heads.requires_grad_(True)
    return Student(
        network=network,
        aim="extension",
        before=before,
        preprocessing=base.parent.preprocessing,
        new_classes=classes,
        frozen=_fold(network, 0, len(network.spec.experts)),
    )


def _fold(network: Network, begin: int, end: int) -> tuple[FoldedExpert, ...]:
    with torch.no_grad():
        return tuple(
            fold_expert(network.experts[index].state_dict(), spec=network.spec, index=index)
            for index in range(begin, end)
        )


def _lineage(spec: NetworkSpec, experts: Sequence[FoldedExpert]) -> Lineage:
    return Lineage(spec, first=experts[0], parts=stack_up(spec, experts))


def _task_name(base: Base, request: AddTask) -> str:
    taken = {task.name for task in base.parent.tasks} if base.parent else set()
    if request.name is not None:
        if spelt_among(request.name, taken):
            raise WrongUsage(f"there is a task named {request.name!r} already; give another --name")
        return new_name(request.name, what="the task name")
    name = new_name(name_of(request.data).strip() or "task", what="the task name")
    return f"{name}-{len(taken) + 1}" if spelt_among(name, taken) else name


def refuse_pretrained(request: AddTask) -> None:
    """Refuse a pre-trained file for a store that has versions: their first expert is fixed."""
    if request.pretrained is not None:
        raise WrongUsage(
            f"--pretrained is for the first task of a store, and {request.store} has versions; "
            "later tasks build on what the first one began with"
        )


def start_of(request: AddTask, *, progress: Progress) -> Start:
    if request.pretrained is None:
        geometry = request.shape.first_network()
        return Start(
            geometry=geometry,
            expert=ExpertSpec(heads=request.shape.heads_of_first()),
            preprocessing=Preprocessing(image_size=geometry.image_size),
        )
    return _pretrained_start(request.pretrained, request.shape, progress=progress)


def _pretrained_start(asked: PretrainedFile, shape: NetworkShape, *, progress: Progress) -> Start:
    if shape.preset is not None:
        raise WrongUsage(
            f"--preset {shape.preset} does not go with --pretrained: the file has its own sizes"
        )
    # A wrong option is refused before a large file is read.
    normalisation = None if asked.normalise is None else normalisation_named(asked.normalise)
    weights = read_pretrained(asked.file, attention_heads=asked.attention_heads)
    mean, std = normalisation or weights.normalisation
    geometry = weights.geometry
    if shape.image_size is not None:  # position embeddings can be resized
        geometry = replace(geometry, image_size=shape.image_size)
    _refuse_other_sizes(shape, geometry, weights.expert)
    if asked.unfreeze_last > geometry.depth:
        raise WrongUsage(
            f"--unfreeze-last {asked.unfreeze_last}: {asked.file} has "
            f"{counted(geometry.depth, 'block')}"
        )
    heads = counted(weights.expert.attention_heads, "attention head")
    progress.note(
        f"starting from {asked.file}: {counted(geometry.depth, 'block')}, {weights.width} "
        f"channels, {heads}, images of {geometry.image_size} pixels, normalised with "
        f"{_named_normalisation(mean, std)}"
    )
    return Start(
        geometry=geometry,
        expert=weights.expert,
        preprocessing=Preprocessing(image_size=geometry.image_size, mean=mean, std=std),
        weights=weights,
        unfreeze_last=asked.unfreeze_last,
    )


def _refuse_other_sizes(shape: NetworkShape, geometry: NetworkSpec, expert: ExpertSpec) -> None:
    fixed = {
        "patch_size": geometry.patch_size,
        "depth": geometry.depth,
        "head_width": geometry.head_width,
        "heads": expert.heads,
    }
    for name, value in fixed.items():
        asked = getattr(shape, name)
        if asked is not None and asked != value:
            option = f"--{name.replace('_', '-')} {asked}"
            raise WrongUsage(f"{option} does not fit: the pre-trained file has fixed it at {value}")


def _named_normalisation(mean: Triple, std: Triple) -> str:
    """Give the value of --normalise for these numbers."""
    for name, known in NORMALISATIONS.items():
        if known == (mean, std):
            return name
    return "/".join(",".join(f"{one:g}" for one in part) for part in (mean, std))


def normalisation_named(text: str) -> tuple[Triple, Triple]:
    """Return mean and deviation of `half`, of `imagenet`, or of the numbers `M,M,M/S,S,S`."""
    if text in NORMALISATIONS:
        return NORMALISATIONS[text]
    try:
        (m1, m2, m3), (s1, s2, s3) = (
            [float(number) for number in part.split(",")] for part in text.split("/")
        )
    except ValueError as error:
        raise WrongUsage(
            f"--normalise {text!r} is neither imagenet, half nor M,M,M/S,S,S"
        ) from error
    if not all(0 < one < float("inf") for one in (s1, s2, s3)) or not all(
        abs(one) < float("inf") for one in (m1, m2, m3)
    ):
        raise WrongUsage(f"--normalise {text!r}: deviations must be above 0, and all finite")
    return (m1, m2, m3), (s1, s2, s3)
