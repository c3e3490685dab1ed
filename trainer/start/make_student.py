"""Make the student: the parent's network with one expert more, before the expert has learnt.

The first student is a network of a preset's sizes, or one around a pre-trained expert.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from model_store.codec import load_network
from model_store.errors import WrongUsage
from model_store.names import new_name, spelt_among
from model_store.network.device import choose_device
from model_store.network.network import Network
from model_store.records.manifest import Scalar
from model_store.spec import ExpertSpec, TaskSpec
from model_store.worth import ADAPTED
from trainer.base import Base
from trainer.data.folders import Listing
from trainer.data.sources.place import name_of
from trainer.learning.student import Student, folded
from trainer.progress import Progress
from trainer.request import AddTask, Learning
from trainer.start.first_network import Start, start_of


def make_student(base: Base, *, request: AddTask, new: Listing, progress: Progress) -> Student:
    new_classes, images = new.names, new.images
    if request.extend:
        return _make_extending(base, request=request, classes=new_classes)
    if base.parent is None:
        return _make_first(base, request=request, new=new, progress=progress)
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
        frozen=folded(network, 0, len(base.parent.experts)),
        adapted_before=any(ADAPTED in task.training for task in base.parent.tasks),
    )


def make_correcting(base: Base, *, request: AddTask, classes: tuple[str, ...]) -> Student:
    """Load the parent's network, whose heads change with the images of some classes."""
    return _make_extending(base, request=request, classes=classes)


def make_deepening(base: Base, *, heads: int, request: Learning) -> Student:
    """Load the parent's network, and give its tasks without an expert one of so many heads."""
    assert base.parent is not None
    network = load_network(base.read_shard, base.parent)
    before, device = network.heads, choose_device(request.device)
    torch.manual_seed(request.seed)
    network.deepen(ExpertSpec(heads=heads))
    network.to(device)
    return Student(
        network=network,
        aim="deepening",
        before=before.to(device),
        preprocessing=base.parent.preprocessing,
        new_classes=network.spec.classes_of_newest_expert,
        frozen=folded(network, 0, len(base.parent.experts)),
    )


def make_adapting(base: Base, *, request: Learning) -> Student:
    """Load the parent's network, whose first expert and heads will change, and the parent."""
    assert base.parent is not None
    device = choose_device(request.device)
    network, parent = (load_network(base.read_shard, base.parent).to(device) for _ in range(2))
    parent.requires_grad_(False).eval()
    return Student(
        network=network,
        aim="adaptation",
        before=parent.heads,
        preprocessing=base.parent.preprocessing,
        new_classes=base.parent.classes,
        parent=parent,
        served=_served_heads(base, device=device),
    )


def _served_heads(base: Base, *, device: torch.device) -> nn.ModuleList | None:
    """Load the heads of the version that serves while the parent was refused. It has the parent's
    experts."""
    if base.store is None or base.head is None or base.parent is None:
        return None
    if base.head.target != base.parent.parent:
        return None
    served = base.store.manifest(base.head.target)
    if served.experts != base.parent.experts:
        return None
    return load_network(base.read_shard, served).heads.to(device)


def _make_first(base: Base, *, request: AddTask, new: Listing, progress: Progress) -> Student:
    classes = new.names
    start = start_of(request, images=new.images, classes=len(classes), progress=progress)
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
        readout_is_open=start.readout_is_open,
    )


def _origin(start: Start) -> dict[str, Scalar]:
    if start.weights is None or start.found is None:
        return {}
    told = {
        "pretrained_from": start.found.repository,
        "pretrained_revision": start.found.revision,
        "pretrained_licence": start.found.licence,
    }
    return {
        "pretrained": start.weights.sha256,
        "unfrozen_blocks": start.unfreeze_last,
        **{name: value for name, value in told.items() if value is not None},
    }


def _make_extending(base: Base, *, request: AddTask, classes: tuple[str, ...]) -> Student:
    """Load the parent's network; only its heads will change."""
    if base.parent is None:
        raise WrongUsage("`extend` needs a version to extend, and the store has none")
    if request.name is not None or request.shape.heads is not None:
        raise WrongUsage("`extend` adds neither task nor expert: `name` and `heads` do not fit it")
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
        frozen=folded(network, 0, len(network.spec.experts)),
    )


def _task_name(base: Base, request: AddTask) -> str:
    taken = {task.name for task in base.parent.tasks} if base.parent else set()
    if request.name is not None:
        if spelt_among(request.name, taken):
            raise WrongUsage(f"there is a task named {request.name!r} already; give another `name`")
        return new_name(request.name, what="the task name")
    name = new_name(name_of(request.data).strip() or "task", what="the task name")
    return f"{name}-{len(taken) + 1}" if spelt_among(name, taken) else name
