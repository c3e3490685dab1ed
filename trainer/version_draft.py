"""Turn a student that has learnt into a draft: shards, exemplars, figures."""

from __future__ import annotations

from model_store import __version__
from model_store.codec import encode_classifier, encode_expert
from model_store.inference.forward import Lineage
from model_store.records.manifest import (
    ClassImages,
    Draft,
    Scalar,
    TaskRecord,
    geometry_of,
    total_bytes,
)
from model_store.records.sealing import timestamp
from model_store.store.shard import shard_ref
from trainer.assess import assess
from trainer.base import Base
from trainer.data.exemplars import herding_order, keep, merged, shrink
from trainer.data.task_data import TaskData
from trainer.evaluation.judged import in_batches
from trainer.learning.student import Student
from trainer.request import AddTask

Shards = dict[str, bytes]


def draft_version(
    student: Student,
    *,
    base: Base,
    data: TaskData,
    request: AddTask,
    transaction: str,
    training: dict[str, Scalar],
) -> tuple[Draft, Shards]:
    """Return the version to publish, and its new shards by digest."""
    experts = student.lineage()
    network, parent = student.network, base.parent
    tasks, shards = _tasks(student, base, training)
    classifier_data = encode_classifier(network)
    classifier = shard_ref("classifier", classifier_data)
    assessment = assess(
        student,
        experts=experts,
        data=data,
        limits=request.limits,
        unknown_rate=request.unknown_rate,
        model_bytes=total_bytes((*(one.expert for one in tasks), classifier)),
    )
    quota = request.memory // (len(network.spec.classes) - len(data.retired))
    memory, memory_shards = _exemplars(student, data, experts=experts, quota=quota)
    held = data.new_held_out
    held_out, held_shards = keep(
        held,
        kind="held-out",
        rows_by_class={name: held.rows_of(name).tolist() for name in student.new_classes},
    )
    draft = Draft(
        parent=parent.version if parent else None,
        parent_digest=parent.digest if parent else None,
        transaction=transaction,
        network=geometry_of(network.spec),
        preprocessing=student.preprocessing,
        tasks=tasks,
        classifier=classifier,
        memory=merged(shrink(base.memory, quota=quota), memory),
        held_out=merged(base.held_out, held_out),
        extended=student.new_classes if student.extends else (),
        retired=data.retired,
        calibration=assessment.calibration,
        unknown=assessment.unknown,
        metrics=assessment.metrics,
        created=timestamp(),
        software=f"dne-serve {__version__}",
    )
    shards[classifier.sha256] = classifier_data
    return draft, {**shards, **memory_shards, **held_shards}


def _tasks(
    student: Student, base: Base, training: dict[str, Scalar]
) -> tuple[tuple[TaskRecord, ...], Shards]:
    """List the parent's tasks and the new one, if there is one, with its expert's shard."""
    older = base.parent.tasks if base.parent else ()
    if student.extends:
        return older, {}
    network = student.network
    newest = network.spec.tasks[-1]
    data = encode_expert(network, len(network.spec.tasks) - 1)
    task = TaskRecord(
        name=newest.name,
        classes=newest.classes,
        heads=newest.expert.heads,
        attention_heads=newest.expert.attention_heads,
        expert=shard_ref("expert", data),
        training=training,
    )
    return (*older, task), {task.expert.sha256: data}


def _exemplars(
    student: Student, data: TaskData, *, experts: Lineage, quota: int
) -> tuple[tuple[ClassImages, ...], Shards]:
    """Choose the new classes' exemplars on clean images, in herding order."""
    network, pool = student.network, data.for_training
    rows_by_class: dict[str, list[int]] = {}
    for name in student.new_classes if quota else ():
        rows = pool.rows_of(name)
        seen = in_batches(
            network, pool.take(rows), experts.token, preprocessing=student.preprocessing
        )
        rows_by_class[name] = rows[herding_order(seen, count=quota)].tolist()
    return keep(pool, kind="memory", rows_by_class=rows_by_class)
