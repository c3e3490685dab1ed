"""The student: the parent's network with one expert more, and how it learns a task."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from model_store.codec import load_network
from model_store.errors import DataRejected, WrongUsage
from model_store.manifest import Preprocessing, Scalar
from model_store.network import Network, choose_device
from model_store.spec import ExpertSpec, TaskSpec, check_name
from trainer.augment import Augmentation
from trainer.checkpoint import Checkpoint
from trainer.data import LabelledImages
from trainer.fit import Plan, fit
from trainer.losses import Objective, Teacher, classification_named
from trainer.progress import Progress
from trainer.request import AddTask, Base
from trainer.task_data import TaskData
from trainer.tune import balanced, can_be_balanced, evened


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


def make_student(base: Base, *, request: AddTask, new_classes: tuple[str, ...]) -> Student:
    teacher = None
    if request.extend:
        return _make_extending(base, request=request, classes=new_classes)
    if base.parent is None:
        network = Network(request.shape.first_network())
        preprocessing = Preprocessing(image_size=network.spec.image_size)
    else:
        request.shape.check_agrees(base.parent.spec)
        network = load_network(base.store.read_shard, base.parent)
        preprocessing = base.parent.preprocessing
        # The old experts stay in the network, so the old heads are all that is left to keep.
        teacher = Teacher(heads=network.heads, classes=len(network.spec.classes))
    task = TaskSpec(
        name=_task_name(base, request),
        classes=new_classes,
        expert=ExpertSpec(heads=request.shape.heads_of_next(network.spec)),
    )
    torch.manual_seed(request.seed)
    network.expand(task)
    device = choose_device(request.device)
    network.to(device)
    if teacher:
        teacher.heads.to(device)
    return Student(
        network=network, teacher=teacher, preprocessing=preprocessing, new_classes=new_classes
    )


def _make_extending(base: Base, *, request: AddTask, classes: tuple[str, ...]) -> Student:
    """The parent's network as it is; only its heads will change."""
    if base.parent is None:
        raise WrongUsage("--extend needs a version to extend, and the store has none")
    if request.name is not None or request.shape.heads is not None:
        raise WrongUsage("--extend adds neither task nor expert: --name and --heads do not fit it")
    request.shape.check_agrees(base.parent.spec)
    device = choose_device(request.device)
    network = load_network(base.store.read_shard, base.parent).to(device)
    teacher = Teacher(heads=copy.deepcopy(network.heads), classes=len(network.spec.classes))
    network.heads.requires_grad_(True)
    return Student(
        network=network,
        teacher=teacher,
        preprocessing=base.parent.preprocessing,
        new_classes=classes,
        extends=True,
    )


def plan_of(student: Student, *, images: LabelledImages, request: AddTask) -> Plan:
    return request.effort.plan(images=len(images), width=student.network.spec.width_of(0))


def learn(
    student: Student,
    *,
    data: TaskData,
    request: AddTask,
    progress: Progress,
    checkpoint: Checkpoint | None = None,
) -> dict[str, Scalar]:
    """Fits the newest expert and all heads, then tunes on balanced classes. Gives the figures."""
    network = student.network
    images = data.for_training
    plan = plan_of(student, images=images, request=request)
    progress.note(
        f"learning {len(student.new_classes)} classes from {len(data.new)} images and "
        f"{len(data.memory)} exemplars: {plan.epochs} epochs in batches of {plan.batch_size}, "
        f"learning rate {plan.learning_rate:.2g}"
    )
    if 0 < request.memory < len(network.spec.classes):
        progress.note(
            f"--memory {request.memory} is less than one image for each of "
            f"{len(network.spec.classes)} classes, so none is kept"
        )
    if student.extends:
        _tune_heads(student, data, request=request, progress=progress, checkpoint=checkpoint)
    else:
        _fit_expert(student, images, request=request, progress=progress, checkpoint=checkpoint)
        if student.teacher and can_be_balanced(images, retired=data.retired):
            _tune(student, data, request=request, progress=progress, checkpoint=checkpoint)
    network.requires_grad_(False).eval()
    return {
        "images": len(data.new),
        "exemplars": len(data.memory),
        "epochs": plan.epochs,
        "batch_size": plan.batch_size,
        "learning_rate": plan.learning_rate,
        "loss": request.loss,
        "seed": request.seed,
    }


def _fit_expert(
    student: Student,
    images: LabelledImages,
    *,
    request: AddTask,
    progress: Progress,
    checkpoint: Checkpoint | None,
) -> None:
    network = student.network
    auxiliary = network.auxiliary_head() if student.teacher else None
    extra = list(auxiliary.parameters()) if auxiliary else []
    fit(
        network,
        images,
        parameters=[*network.learnable(), *extra],
        objective=Objective(
            classification=classification_named(request.loss),
            teacher=student.teacher,
            auxiliary=auxiliary,
        ),
        plan=plan_of(student, images=images, request=request),
        augment=_augmentation(student, request),
        preprocessing=student.preprocessing,
        draw_epoch=evened(images, among=student.new_classes),
        seed=request.seed,
        name="learning",
        progress=progress,
        checkpoint=checkpoint,
    )


def _tune_heads(
    student: Student,
    data: TaskData,
    *,
    request: AddTask,
    progress: Progress,
    checkpoint: Checkpoint | None,
) -> None:
    """An extension: all classes alike, and no expert moves."""
    images, heads = data.for_training, student.network.heads
    missing = [
        name
        for name in images.classes
        if name not in data.retired and not len(images.rows_of(name))
    ]
    if missing:
        raise DataRejected(
            f"the store keeps no images of {', '.join(map(repr, missing[:20]))}: tuning the "
            "classifier without them would make it forget them; give images of all classes"
        )
    fit(
        student.network,
        images,
        parameters=list(heads.parameters()),
        objective=Objective(classification=classification_named(request.loss)),
        plan=plan_of(student, images=images, request=request),
        augment=_augmentation(student, request),
        preprocessing=student.preprocessing,
        draw_epoch=balanced(images, retired=data.retired),
        seed=request.seed,
        name="extending",
        progress=progress,
        checkpoint=checkpoint,
    )


def _tune(
    student: Student,
    data: TaskData,
    *,
    request: AddTask,
    progress: Progress,
    checkpoint: Checkpoint | None,
) -> None:
    network, images = student.network, data.for_training
    network.experts[-1].requires_grad_(False)
    for parameter in network.tunable():
        parameter.requires_grad_(True)
    plan = plan_of(student, images=images, request=request)
    fit(
        network,
        images,
        parameters=network.tunable(),
        objective=Objective(
            classification=classification_named(request.loss), teacher=student.teacher
        ),
        plan=request.effort.tuning(plan),
        augment=_augmentation(student, request),
        preprocessing=student.preprocessing,
        draw_epoch=balanced(images, retired=data.retired),
        seed=request.seed + 1,
        name="balancing",
        progress=progress,
        checkpoint=checkpoint,
    )


def _augmentation(student: Student, request: AddTask) -> Augmentation:
    return Augmentation.named(
        request.augment, flip=request.flip, image_size=student.preprocessing.image_size
    )


def _task_name(base: Base, request: AddTask) -> str:
    taken = {task.name for task in base.parent.tasks} if base.parent else set()
    if request.name is not None:
        if request.name in taken:
            raise WrongUsage(f"there is a task named {request.name!r} already; give another --name")
        return check_name(request.name, what="the task name")
    name = request.data.resolve().name.strip() or "task"
    return name if name not in taken else f"{name}-{len(taken) + 1}"
