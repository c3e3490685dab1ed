"""Turn a student that has learnt and was judged into a draft of a version, and its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from model_store import __version__
from model_store.codec import encode_classifier, encode_expert
from model_store.records.manifest import (
    ClassImages,
    ClassTokens,
    Draft,
    Scalar,
    ShardKind,
    ShardRef,
    TaskRecord,
    geometry_of,
    task_record,
    total_bytes,
)
from model_store.records.quality import TrainingRun, Unknown
from model_store.records.sealing import timestamp
from model_store.store.shard import decode_images, shard_ref
from trainer.base import Base
from trainer.data.exemplars import keep, merged, shrink
from trainer.data.folders import LabelledImages
from trainer.data.pictures import StoredImage
from trainer.data.task_data import TaskData
from trainer.embeddings.cache import EmbeddingCache
from trainer.embeddings.statistics import encode
from trainer.learning.student import Learnt, Student
from trainer.request import Learning
from trainer.versions.assess import Assessment
from trainer.versions.finish import Final, quota_of

Shards = dict[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedModel:
    """The shards that answer: experts, of which one may be new, and the classifier."""

    tasks: tuple[TaskRecord, ...]
    classifier: ShardRef
    new_shards: Mapping[str, bytes]
    """The new expert, if there is one, and the classifier, by their digests."""

    @property
    def bytes(self) -> int:
        experts = [one.expert for one in self.tasks if one.expert]
        return total_bytes((*experts, self.classifier))


def encode_model(student: Student, *, base: Base, learnt: Learnt) -> EncodedModel:
    tasks, shards = _tasks(student, base, learnt.training)
    data = encode_classifier(student.network)
    classifier = shard_ref("classifier", data)
    return EncodedModel(
        tasks=tasks, classifier=classifier, new_shards={**shards, classifier.sha256: data}
    )


def draft_version(
    student: Student,
    *,
    base: Base,
    data: TaskData,
    request: Learning,
    transaction: str,
    learnt: Learnt,
    final: Final,
    model: EncodedModel,
    assessment: Assessment,
    run: TrainingRun,
) -> tuple[Draft, Shards]:
    """Return the version to publish, and its new shards by digest."""
    network, parent = student.network, base.parent
    shards = dict(model.new_shards)
    doubt = shard_ref("doubt", assessment.doubt) if assessment.doubt else None
    memory, held_out, image_shards = _images_to_keep(student, base, data, final, request)
    final.cache.save()
    statistics, statistics_shards = _statistics(
        learnt, base, classes=network.spec.classes, adapted=student.aim == "adaptation"
    )
    draft = Draft(
        parent=parent.version if parent else None,
        parent_digest=parent.digest if parent else None,
        transaction=transaction,
        network=geometry_of(network.spec),
        preprocessing=student.preprocessing,
        tasks=model.tasks,
        classifier=model.classifier,
        doubt=doubt,
        memory=memory,
        held_out=held_out,
        statistics=statistics,
        extended=student.new_classes if student.aim == "extension" else (),
        corrected=data.corrected,
        deepened=_deepened(student),
        adapted=student.aim == "adaptation",
        retired=data.retired,
        hierarchy=data.hierarchy,
        calibration=assessment.calibration,
        unknown=_with_thresholds(assessment.unknown, base, data),
        metrics=assessment.metrics.model_copy(update={"run": run}),
        created=timestamp(),
        software=f"dne-serve {__version__}",
    )
    if doubt is not None and assessment.doubt is not None:
        shards[doubt.sha256] = assessment.doubt
    return draft, {**shards, **image_shards, **statistics_shards}


def _with_thresholds(unknown: Unknown | None, base: Base, data: TaskData) -> Unknown | None:
    """Hand on the thresholds that people have set for classes: as a retirement, such a word stands
    until it is taken back."""
    before = base.parent.unknown if base.parent else None
    if unknown is None or before is None:
        return unknown
    kept = {name: one for name, one in before.by_class.items() if name not in data.retired}
    return unknown.with_thresholds(kept)


Kept = tuple[ClassImages, ...]


def _images_to_keep(
    student: Student, base: Base, data: TaskData, final: Final, request: Learning
) -> tuple[Kept, Kept, Shards]:
    """Encode exemplars and held-out images. Return their entries, and new shards."""
    if not request.keeps_pictures:
        return (), (), {}
    older = shrink(base.memory, quota=quota_of(student, data, request))
    if student.aim in (
        "deepening",
        "adaptation",
    ):  # there are no images but those that are kept already
        return older, base.held_out, {}
    cache = final.cache
    memory, memory_shards = _keep(
        data.for_training,
        kind="memory",
        rows_by_class=final.exemplars,
        cache=cache,
        student=student,
    )
    held = data.new_held_out
    rows_by_class = {name: held.rows_of(name).tolist() for name in student.new_classes}
    held_out, held_shards = _keep(
        held, kind="held-out", rows_by_class=rows_by_class, cache=cache, student=student
    )
    shards = {**memory_shards, **held_shards}
    # A class may have lost the last image to judge by to another one.
    gone = set(student.new_classes) - {entry.class_name for entry in held_out}
    before = [entry for entry in base.held_out if entry.class_name not in gone]
    return merged(older, memory), merged(before, held_out), shards


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
    if student.aim == "adaptation":
        return _with_adapted(older, expert, training), {expert.sha256: data}
    if student.aim == "deepening":
        newest, older = older[-1], older[:-1]
        # The record of the task's own images stays: they are what its classes were learnt from.
        training = {**newest.training, **{f"expert_{name}": one for name, one in training.items()}}
    task = task_record(network.spec.tasks[-1], expert=expert, training=dict(training))
    return (*older, task), {expert.sha256: data}


def _with_adapted(
    tasks: tuple[TaskRecord, ...], expert: ShardRef, training: Mapping[str, Scalar]
) -> tuple[TaskRecord, ...]:
    """Put the adapted expert in the place of the first one. The newest task's record tells how it
    was adapted, because its images were the reason."""
    first, *others = tasks
    tasks = (first.model_copy(update={"expert": expert}), *others)
    newest = tasks[-1]
    figures = {f"adapted_{name}": one for name, one in training.items()}
    figured = newest.model_copy(update={"training": {**newest.training, **figures}})
    return (*tasks[:-1], figured)


def _deepened(student: Student) -> tuple[str, ...]:
    if student.aim != "deepening":
        return ()
    return tuple(task.name for task in student.network.spec.tasks_of_newest_expert)


def _statistics(
    learnt: Learnt, base: Base, *, classes: Sequence[str], adapted: bool
) -> tuple[tuple[ClassTokens, ...], Shards]:
    """Hand on the statistics of older classes, and encode those that are new. Those by another
    first expert are not handed on."""
    kept = () if adapted else base.statistics
    by_class, shards = {entry.class_name: entry for entry in kept}, {}
    for name, statistics in learnt.statistics.items():
        data = encode(statistics)
        ref = shard_ref("statistics", data)
        shards[ref.sha256] = data
        by_class[name] = ClassTokens(class_name=name, shard=ref, count=statistics.count)
    return tuple(by_class[name] for name in classes if name in by_class), shards


def _keep(
    images: LabelledImages,
    *,
    kind: ShardKind,
    rows_by_class: Mapping[str, Sequence[int]],
    cache: EmbeddingCache,
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
