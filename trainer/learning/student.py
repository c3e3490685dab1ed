"""The student: the parent's network with one expert more, before it has learnt anything."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import nn

from model_store.codec import load_network
from model_store.errors import WrongUsage
from model_store.names import new_name, spelt_among
from model_store.network.device import choose_device
from model_store.network.network import Network
from model_store.records.manifest import Preprocessing, Scalar
from model_store.spec import ExpertSpec, TaskSpec
from trainer.data.folders import Listing
from trainer.learning.losses import Teacher
from trainer.learning.start import Start, start_of
from trainer.progress import Progress
from trainer.request import AddTask, Base


@dataclass(frozen=True, slots=True, kw_only=True)
class Student:
    """The network that learns. Its teacher is the parent: the older experts and the old heads."""

    network: Network
    teacher: Teacher | None
    preprocessing: Preprocessing
    new_classes: tuple[str, ...]
    """What is to be learnt; in an extension, classes that have more images now."""
    extends: bool = False
    """Whether it has no new expert, and only the classifier is tuned again."""
    origin: dict[str, Scalar] = field(default_factory=dict)
    """Where its newest expert's weights come from, for the record; empty if from chance."""

    @property
    def on_pretrained(self) -> bool:
        """Whether the first expert was pre-trained: only then is the token in the sequence."""
        return self.network.spec.token == "in-sequence"

    @property
    def given(self) -> list[nn.Parameter]:
        """What it learns of an expert that came from a file: near where it should be already."""
        return self.network.newest.learnable() if self.origin else []

    @property
    def learns_by_steps(self) -> bool:
        """Whether there is an expert to learn, and not only a classifier on top of what is."""
        newest = self.network.newest
        return bool(newest.learnable()) and not (self.extends and self.on_pretrained)


def make_student(base: Base, *, request: AddTask, new: Listing, progress: Progress) -> Student:
    new_classes, images = new.names, new.images
    if request.extend:
        return _make_extending(base, request=request, classes=new_classes)
    if base.parent is None:
        return _make_first(base, request=request, classes=new_classes, progress=progress)
    request.shape.check_agrees(base.parent.spec)
    network = load_network(base.read_shard, base.parent)
    # The old experts stay in the network, so the old heads are all that is left to keep.
    teacher = Teacher(heads=network.heads, classes=len(network.spec.classes))
    expert = ExpertSpec(heads=request.shape.heads_of_later(images=images))
    torch.manual_seed(request.seed)
    network.expand(TaskSpec(name=_task_name(base, request), classes=new_classes, expert=expert))
    device = choose_device(request.device)
    teacher.heads.to(device)
    return Student(
        network=network.to(device),
        teacher=teacher,
        preprocessing=base.parent.preprocessing,
        new_classes=new_classes,
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
        teacher=None,
        preprocessing=start.preprocessing,
        new_classes=classes,
        origin=_origin(start),
    )


def _origin(start: Start) -> dict[str, Scalar]:
    if start.weights is None:
        return {}
    return {"pretrained": start.weights.sha256, "unfrozen_blocks": start.unfreeze_last}


def _make_extending(base: Base, *, request: AddTask, classes: tuple[str, ...]) -> Student:
    """The parent's network as it is; only its heads will change."""
    if base.parent is None:
        raise WrongUsage("--extend needs a version to extend, and the store has none")
    if request.name is not None or request.shape.heads is not None:
        raise WrongUsage("--extend adds neither task nor expert: --name and --heads do not fit it")
    request.shape.check_agrees(base.parent.spec)
    device = choose_device(request.device)
    network = load_network(base.read_shard, base.parent).to(device)
    teacher = Teacher(heads=copy.deepcopy(network.heads), classes=len(network.spec.classes))
    network.heads.requires_grad_(True)
    return Student(
        network=network,
        teacher=teacher,
        preprocessing=base.parent.preprocessing,
        new_classes=classes,
        extends=True,
    )


def _task_name(base: Base, request: AddTask) -> str:
    taken = {task.name for task in base.parent.tasks} if base.parent else set()
    if request.name is not None:
        if spelt_among(request.name, taken):
            raise WrongUsage(f"there is a task named {request.name!r} already; give another --name")
        return new_name(request.name, what="the task name")
    name = new_name(request.data.resolve().name.strip() or "task", what="the task name")
    return f"{name}-{len(taken) + 1}" if spelt_among(name, taken) else name
