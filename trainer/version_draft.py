"""Turn a student that has learnt into a draft: shards, exemplars, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from model_store import __version__
from model_store.codec import decode_images, encode_classifier, encode_expert
from model_store.records.manifest import (
    ClassImages,
    ClassTokens,
    Draft,
    Scalar,
    ShardKind,
    TaskRecord,
    geometry_of,
    task_record,
    total_bytes,
)
from model_store.records.sealing import timestamp
from model_store.store.shard import shard_ref
from trainer.assess import assess
from trainer.base import Base
from trainer.data.exemplars import herding_order, keep, merged, shrink
from trainer.data.folders import LabelledImages
from trainer.data.pictures import StoredImage
from trainer.data.task_data import TaskData
from trainer.learning.student import Learnt, Student
from trainer.learning.token_reading import cache_of, reduced_tokens_of
from trainer.request import Learning
from trainer.tokens.cache import TokenCache
from trainer.tokens.statistics import encode

Shards = dict[str, bytes]


def draft_version(
    student: Student,
    *,
    base: Base,
    data: TaskData,
    request: Learning,
    transaction: str,
    learnt: Learnt,
) -> tuple[Draft, Shards]:
    """Return the version to publish, and its new shards by digest."""
    experts = student.lineage()
    cache = cache_of(student, experts, folder=request.tokens)
    network, parent = student.network, base.parent
    tasks, shards = _tasks(student, base, learnt.training)
    classifier_data = encode_classifier(network)
    classifier = shard_ref("classifier", classifier_data)
    assessment = assess(
        student,
        experts=experts,
        cache=cache,
        reduced_tokens=reduced_tokens_of(student, folder=request.tokens),
        data=data,
        tokens_NW=learnt.tokens_NW,
        labels_N=learnt.labels_N,
        limits=request.limits,
        unknown_rate=request.unknown_rate,
        fitted_on=learnt.fitted_on,
        model_bytes=total_bytes((*(one.expert for one in tasks if one.expert), classifier)),
    )
    doubt = shard_ref("doubt", assessment.doubt) if assessment.doubt else None
    memory, held_out, image_shards = _images_to_keep(student, base, data, cache, request)
    cache.save()
    statistics, statistics_shards = _statistics(learnt, base, classes=network.spec.classes)
    draft = Draft(
        parent=parent.version if parent else None,
        parent_digest=parent.digest if parent else None,
        transaction=transaction,
        network=geometry_of(network.spec),
        preprocessing=student.preprocessing,
        tasks=tasks,
        classifier=classifier,
        doubt=doubt,
        memory=memory,
        held_out=held_out,
        statistics=statistics,
        extended=student.new_classes if student.aim == "extension" else (),
        deepened=_deepened(student),
        retired=data.retired,
        hierarchy=data.hierarchy,
        calibration=assessment.calibration,
        unknown=assessment.unknown,
        metrics=assessment.metrics,
        created=timestamp(),
        software=f"dne-serve {__version__}",
    )
    shards[classifier.sha256] = classifier_data
    if doubt is not None and assessment.doubt is not None:
        shards[doubt.sha256] = assessment.doubt
    return draft, {**shards, **image_shards, **statistics_shards}


Kept = tuple[ClassImages, ...]


def _images_to_keep(
    student: Student, base: Base, data: TaskData, cache: TokenCache, request: Learning
) -> tuple[Kept, Kept, Shards]:
    """Choose exemplars and held-out images. Return their entries, and new shards."""
    if not request.keeps_pictures:
        return (), (), {}
    quota = request.exemplars // (len(student.network.spec.classes) - len(data.retired))
    older = shrink(base.memory, quota=quota)
    if student.aim == "deepening":  # there are no images but those that are kept already
        return older, base.held_out, {}
    memory, memory_shards = _exemplars(student, data, cache=cache, quota=quota)
    held = data.new_held_out
    rows_by_class = {name: held.rows_of(name).tolist() for name in student.new_classes}
    held_out, held_shards = _keep(
        held, kind="held-out", rows_by_class=rows_by_class, cache=cache, student=student
    )
    shards = {**memory_shards, **held_shards}
    return merged(older, memory), merged(base.held_out, held_out), shards


def _tasks(
    student: Student, base: Base, training: Mapping[str, Scalar]
) -> tuple[tuple[TaskRecord, ...], Shards]:
    """List the tasks, with the shard of a new expert, if there is one."""
    older = base.parent.tasks if base.parent else ()
    network = student.network
    if student.aim == "extension":
        return older, {}
    if student.aim == "head":
        task = task_record(network.spec.tasks[-1], expert=None, training=dict(training))
        return (*older, task), {}
    data = encode_expert(network, len(network.spec.experts) - 1)
    expert = shard_ref("expert", data)
    if student.aim == "deepening":
        newest, older = older[-1], older[:-1]
        # The record of the task's own images stays: they are what its classes were learnt from.
        training = {**newest.training, **{f"expert_{name}": one for name, one in training.items()}}
    task = task_record(network.spec.tasks[-1], expert=expert, training=dict(training))
    return (*older, task), {expert.sha256: data}


def _deepened(student: Student) -> tuple[str, ...]:
    if student.aim != "deepening":
        return ()
    return tuple(task.name for task in student.network.spec.tasks_of_newest_expert)


def _statistics(
    learnt: Learnt, base: Base, *, classes: Sequence[str]
) -> tuple[tuple[ClassTokens, ...], Shards]:
    """Hand on the statistics of older classes, and encode those that are new."""
    by_class, shards = {entry.class_name: entry for entry in base.statistics}, {}
    for name, statistics in learnt.statistics.items():
        data = encode(statistics)
        ref = shard_ref("statistics", data)
        shards[ref.sha256] = data
        by_class[name] = ClassTokens(class_name=name, shard=ref, count=statistics.count)
    return tuple(by_class[name] for name in classes if name in by_class), shards


def _exemplars(
    student: Student, data: TaskData, *, cache: TokenCache, quota: int
) -> tuple[Kept, Shards]:
    """Choose the new classes' exemplars on clean images, in herding order."""
    pool = data.for_training
    rows_by_class: dict[str, list[int]] = {}
    for name in student.new_classes if quota else ():
        rows = pool.rows_of(name)
        seen = cache.tokens(pool.take(rows))
        rows_by_class[name] = rows[herding_order(seen, count=quota)].tolist()
    return _keep(pool, kind="memory", rows_by_class=rows_by_class, cache=cache, student=student)


def _keep(
    images: LabelledImages,
    *,
    kind: ShardKind,
    rows_by_class: Mapping[str, Sequence[int]],
    cache: TokenCache,
    student: Student,
) -> tuple[Kept, Shards]:
    """Encode images, and let the next run find their tokens without decoding them."""
    entries, shards = keep(images, kind=kind, rows_by_class=rows_by_class)
    for entry in entries:
        files = decode_images(shards[entry.shard.sha256], count=entry.count)
        rows = np.array(rows_by_class[entry.class_name], dtype=np.int64)
        stored = [StoredImage(one, student.preprocessing) for one in files]
        cache.also_name(images.take(rows), stored)
    return entries, shards
