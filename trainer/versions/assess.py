"""Judge a student by images that it was not trained on: figures, calibration, verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from model_store.codec import decode_doubt, encode_doubt
from model_store.inference.forward import Lineage
from model_store.records.quality import Accuracy, Calibration, Metrics, Unknown
from model_store.tables import counted
from trainer.data.folders import LabelledImages
from trainer.data.groups import numbers_of
from trainer.data.task_data import TaskData
from trainer.embeddings.cache import EmbeddingCache, Floats
from trainer.evaluation.forecast import latencies_ms
from trainer.evaluation.gate import FEWEST, GateInput, decide, noticed
from trainer.evaluation.judged import Judged, calibrate, choose_shown, judged_by
from trainer.evaluation.precision_agreement import ReadEmbeddings, agreement_of
from trainer.evaluation.price import NO_PRICE, Price
from trainer.evaluation.unknown import (
    FEWEST_CLASSES,
    DoubtFit,
    fit_doubt,
    fit_threshold,
    is_few,
    scores_of,
)
from trainer.learning.student import Student
from trainer.progress import Progress
from trainer.request import GateLimits
from trainer.versions.finish import JUDGING


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    metrics: Metrics
    calibration: Calibration
    unknown: Unknown | None
    doubt: bytes | None
    """The shard of the score by which `unknown` judges; None for the largest logit."""


_TIMED_RUNS = 11


def assess(
    student: Student,
    *,
    experts: Lineage,
    cache: EmbeddingCache,
    parent_cache: EmbeddingCache | None = None,
    reduced_tokens: ReadEmbeddings,
    data: TaskData,
    tokens_NW: Floats | None,
    labels_N: NDArray[np.int64] | None,
    groups_N: NDArray[np.int64] | None,
    limits: GateLimits,
    unknown_rate: float,
    model_bytes: int,
    progress: Progress,
    fitted_on: int = 0,
    shows_images: bool = False,
    price: Price = NO_PRICE,
) -> Assessment:
    """Judge by images that were held out.

    `tokens_NW`: those that the classifier was fitted to, if they are to tell unknown images, with
    `labels_N` and `groups_N`. `parent_cache`: the tokens by the parent's experts, where they are
    not the student's. `model_bytes`: without the shard that tells them. `fitted_on` counts the
    images that the classifier has a temperature from. `shows_images`: the images stay in the store,
    and the report may name some.
    """
    newest, older = student.new_classes, _older(student)
    with progress.phase(JUDGING, total=len(data.judged_by)) as phase:
        judged, parent, judged_token_NW = _judge_both(
            student, data, cache, parent_cache, advance=phase.advance
        )
        served = _judge_served(student, data, parent_cache)
    fitted = None
    if tokens_NW is not None and labels_N is not None and len(data.judged_by):
        adapted = student.aim == "adaptation" or student.adapted_before
        few = data.source == "held-out" and is_few(len(data.judged_by), rate=unknown_rate)
        more_NW = judged_token_NW if few and not adapted else None
        fitted = _doubt(tokens_NW, labels_N, groups_N, student, data, more_NW=more_NW)
    shard = encode_doubt(fitted.tensors) if fitted else None
    together = _together(data.judged_by)
    gate = decide(
        GateInput(
            judged=judged,
            parent=parent,
            older=older,
            newest=newest,
            model_bytes=model_bytes + len(shard or b""),
            deepens=student.aim in ("deepening", "adaptation"),
            slower=student.aim != "adaptation",
            served=served,
            served_classes=_classes_of(student.served, data) if student.served else (),
            latency_ms=_latency_ms(student, experts) if limits.max_latency_ms else None,
            hierarchy=data.hierarchy,
            price=price,
            together=together,
        ),
        limits=limits,
    )
    calibration = calibrate(
        judged, older=older, newest=newest, fitted_on=fitted_on, together=together
    )
    doubt = decode_doubt(shard, places=_answered(data)) if shard else None
    judged_scores_N = scores_of(judged.logits_NC, judged_token_NW, doubt=doubt)
    pools = fitted is not None and fitted.knows_held_out
    unknown = fit_threshold(
        fitted.left_out_F if fitted and pools else judged_scores_N,
        score="log-odds" if doubt else "max-logit",
        rate=unknown_rate,
        left_out_N=fitted.left_out_F if fitted else None,
    )
    images = len(data.judged_by)
    return Assessment(
        metrics=Metrics(
            accuracy=Accuracy(
                all=judged.accuracy(),
                old=judged.accuracy(older),
                new=judged.accuracy(newest),
                parent_old=parent.accuracy(older) if parent else None,
            ),
            per_class=judged.per_class(),
            images=images,
            source=data.source if images else "none",
            confusion=judged.confusion() if images else {},
            gate=gate,
            agreement=agreement_of(
                student.network,
                images=data.judged_by,
                judged=judged,
                preprocessing=student.preprocessing,
                temperature=calibration.temperature,
                embeddings_NW=judged_token_NW,
                read_embeddings=reduced_tokens,
                doubt=doubt,
            ),
            shown=choose_shown(judged, parent, older=older, temperature=calibration.temperature)
            if shows_images
            else (),
            scores=judged.score_counts(temperature=calibration.temperature) if images else None,
        ),
        calibration=calibration,
        unknown=unknown,
        doubt=shard,
    )


def _together(images: LabelledImages) -> float:
    """Return the images of a group of images that belong together, on average."""
    return len(images) / len(np.unique(numbers_of(images))) if len(images) else 1.0


def can_doubt(student: Student, data: TaskData) -> bool:
    """Return whether there are images to fit the score of unknown images to, and to judge it by."""
    known = {kept.entry.class_name: kept.entry.count for kept in data.statistics}
    counts = [
        max(known.get(name, 0), len(data.for_training.rows_of(name)))
        for name in data.for_training.classes
        if name not in data.retired
    ]
    enough = all(counts) and sum(count > 1 for count in counts) >= FEWEST_CLASSES
    return student.on_pretrained and enough and len(data.judged_by) > 0


def _doubt(
    tokens_NW: Floats,
    labels_N: NDArray[np.int64],
    groups_N: NDArray[np.int64] | None,
    student: Student,
    data: TaskData,
    *,
    more_NW: Floats | None,
) -> DoubtFit | None:
    """Fit the score of unknown images to the oldest expert's slice of the tokens: it was learnt on
    more than these classes, and tells what is none of them. `more_NW`: tokens of held-out images,
    where these are so few that the score and its threshold stand on all images together."""
    spec, answered = student.network.spec, _answered(data)
    tokens_NW = tokens_NW[:, : spec.doubt_width]
    pools = more_NW is not None and groups_N is not None
    if more_NW is not None and groups_N is not None:
        known_N = np.isin(data.judged_by.labels_N, answered)
        more_groups_N = groups_N.max() + 1 + numbers_of(data.judged_by)
        tokens_NW = np.concatenate([tokens_NW, more_NW[known_N, : spec.doubt_width]])
        labels_N = np.concatenate([labels_N, data.judged_by.labels_N[known_N]])
        groups_N = np.concatenate([groups_N, more_groups_N[known_N]])
    fit = fit_doubt(
        tokens_NW, labels_N, classes=len(spec.classes), answered=answered, groups_N=groups_N
    )
    return replace(fit, knows_held_out=pools and len(fit.left_out_F) > 0) if fit else None


def _answered(data: TaskData) -> list[int]:
    classes = data.for_training.classes
    return [place for place, name in enumerate(classes) if name not in data.retired]


def say_evidence(
    student: Student, *, data: TaskData, limits: GateLimits, progress: Progress
) -> None:
    """Tell before learning by how many images the gate will judge."""
    images = data.judged_by
    new = _count_of(images, student.new_classes)
    says = f"the gate will judge by {counted(new, 'image')} of new classes"
    if student.knows_all:
        all_images = _count_of(images, _older(student))
        says = f"the gate will judge by {counted(all_images, 'image')} of all classes"
        says += _power(all_images, limits=limits)
    elif student.before is not None:
        old_images = _count_of(images, _older(student))
        says += f" and {old_images} of old ones{_power(old_images, limits=limits)}"
    if limits.min_new and new < FEWEST["new"]:
        says += (
            f"; a least accuracy needs {FEWEST['new']} of new classes: give more validation images"
        )
    progress.note(says)


def _power(old_images: int, *, limits: GateLimits) -> str:
    """Say what the images of classes that were there before are good for.

    The shares were measured at the default limit; one that lets more pass notices less.
    """
    if old_images < FEWEST["old"] or limits.max_drop > GateLimits().max_drop:
        return ""
    times = round(10 * noticed(old_images))
    often = f"about {counted(times, 'time')} in 10" if times else "hardly ever"
    return f"; they notice a fall of 5 points {often}"


def _count_of(images: LabelledImages, names: tuple[str, ...]) -> int:
    return sum(len(images.rows_of(name)) for name in names)


def _older(student: Student) -> tuple[str, ...]:
    """List the old classes: all, where each has to be as good as before."""
    newest, classes = student.new_classes, student.network.spec.classes
    return tuple(name for name in classes if student.knows_all or name not in newest)


def _latency_ms(student: Student, experts: Lineage) -> float:
    return median(latencies_ms(student.network, experts, runs=_TIMED_RUNS))


def _judge_served(
    student: Student, data: TaskData, parent_cache: EmbeddingCache | None
) -> Judged | None:
    """Judge the version that serves, where it is not the parent but has the parent's experts."""
    if student.served is None or student.parent is None or parent_cache is None:
        return None
    token_NW = torch.from_numpy(parent_cache.embeddings(data.judged_by)).to(student.network.device)
    with torch.no_grad():
        logits_NC = student.parent.classify([token_NW], student.served).cpu().numpy()
    return judged_by(logits_NC, data.judged_by, retired=data.retired)


def _classes_of(heads: nn.ModuleList, data: TaskData) -> tuple[str, ...]:
    """List the classes that these heads answer: the first ones."""
    count = sum(head.out_features for head in heads if isinstance(head, nn.Linear))
    return tuple(name for name in data.judged_by.classes[:count] if name not in data.retired)


def _judge_both(
    student: Student,
    data: TaskData,
    cache: EmbeddingCache,
    parent_cache: EmbeddingCache | None,
    *,
    advance: Callable[[int], None],
) -> tuple[Judged, Judged | None, Floats]:
    """Judge the student and its parent, by the same tokens if they have the same experts. Return
    the oldest slice of the student's tokens too."""
    network, before, images = student.network, student.before, data.judged_by
    found_NW = cache.embeddings(images, advance=advance)

    def judged(heads: nn.ModuleList, tokens_NW: Floats) -> Judged:
        token_NW = torch.from_numpy(tokens_NW).to(network.device)
        with torch.no_grad():
            logits_NC = network.classify([token_NW], heads).cpu().numpy()
        return judged_by(logits_NC, images, retired=data.retired)

    parent = None
    if before is not None:
        parent = judged(before, parent_cache.embeddings(images) if parent_cache else found_NW)
    student_judged = judged(network.heads, found_NW)
    return student_judged, parent, found_NW[:, : network.spec.doubt_width]
