"""Put the advice on a version together: from embeddings and labels of the images at hand.

Only the oldest expert's slice of an embedding is read. Younger experts have learnt from these very
images, and would take every label for right. N images, W channels of that slice.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model_store.layout import ITEM_ID
from model_store.preprocess import dhash
from model_store.report.advice import (
    LOOKED_AT,
    MAX_LISTED,
    MAX_NAME,
    Advice,
    AdvisedImage,
    ClassAdvice,
    Confused,
    Copy,
    Suspect,
)
from model_store.tables import counted
from trainer.advice.left_out import (
    FEWEST_IMAGES,
    Doubles,
    Flags,
    Labels,
    LeftOut,
    distinct,
    leave_out,
)
from trainer.data.folders import LabelledImages, join
from trainer.data.task_data import TaskData
from trainer.embeddings.cache import EmbeddingCache
from trainer.learning.student import Learnt, Student

_MOST_SHOWN = 24
"""The label errors that people see with their pictures."""
_FEWEST_CONFUSED = 2
"""One image that is taken for another class is not a confusion yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doubted:
    """The probabilities of left-out images, and what follows from them."""

    rows_M: Labels
    """The images in the order of doubt: the likeliest label errors first."""
    suspected_M: Flags
    answers_M: Labels
    score_M: Doubles
    """The probability of the image's own label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConfusedPair:
    """Images of a class that were taken for another, the surest mistakes first."""

    label: int
    taken_for: int
    rows: NDArray[np.int64]


def doubt_labels(left_out: LeftOut, labels_N: Labels) -> _Doubted:
    """Rank all images that were left out by the probability of their labels."""
    rows = np.flatnonzero(left_out.judged_N)
    labels_M, chances_MC = labels_N[rows], _softmax(left_out.logits_NC[rows])
    own_M = chances_MC[np.arange(len(rows)), labels_M]
    thresholds_C = _thresholds(chances_MC, labels_M)
    answers_M = chances_MC.argmax(axis=1)
    sure_M = chances_MC[np.arange(len(rows)), answers_M] >= thresholds_C[answers_M]
    order = np.argsort(_margins(left_out.logits_NC[rows], labels_M), kind="stable")
    return _Doubted(
        rows_M=rows[order].astype(np.int64),
        suspected_M=((answers_M != labels_M) & sure_M)[order],
        answers_M=answers_M[order].astype(np.int64),
        score_M=own_M[order],
    )


def confusions(left_out: LeftOut, labels_N: Labels) -> list[_ConfusedPair]:
    """List pairs of classes that are confused, the most frequent first."""
    rows = np.flatnonzero(left_out.judged_N)
    labels_M, logits_MC = labels_N[rows], left_out.logits_NC[rows]
    answers_M = logits_MC.argmax(axis=1)
    pairs = []
    for label, answer in {*zip(labels_M.tolist(), answers_M.tolist(), strict=True)}:
        these = np.flatnonzero((labels_M == label) & (answers_M == answer))
        if label != answer and len(these) >= _FEWEST_CONFUSED:
            margin = logits_MC[these, label] - logits_MC[these, answer]
            ordered = rows[these[np.argsort(margin, kind="stable")]].astype(np.int64)
            pairs.append(_ConfusedPair(label=label, taken_for=answer, rows=ordered))
    return sorted(pairs, key=lambda pair: (-len(pair.rows), pair.label, pair.taken_for))


def _thresholds(chances_MC: Doubles, labels_M: Labels) -> Doubles:
    """Average the probability of each class over the images that bear its label."""
    thresholds_C = np.ones(chances_MC.shape[1])
    for place in np.unique(labels_M):
        thresholds_C[place] = chances_MC[labels_M == place, place].mean()
    return thresholds_C


def _margins(logits_MC: Doubles, labels_M: Labels) -> Doubles:
    """Return how far a label is above its best rival. Unlike a probability it does not round off
    to zero for the surest mistakes, so it orders them."""
    own_M = logits_MC[np.arange(len(labels_M)), labels_M]
    others_MC = logits_MC.copy()
    others_MC[np.arange(len(labels_M)), labels_M] = -np.inf
    return np.asarray(own_M - others_MC.max(axis=1))


def _softmax(logits_MC: Doubles) -> Doubles:
    weights = np.exp(logits_MC - logits_MC.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


_LEAST_COSINE = 0.9
"""The least cosine of embeddings of which hashes are compared: copies after JPEG, scaling and light
have more, and hashes of other images agree by chance."""
_MOST_BITS = 6
"""The most bits in which the hashes of copies differ (ADR 66)."""
ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class _NearCopy:
    judged: int
    learnt: int
    bits: int


def _find_copies(
    judged: LabelledImages,
    learnt: LabelledImages,
    *,
    judged_MW: Doubles,
    learnt_NW: Doubles,
) -> list[_NearCopy]:
    """Pair each image to judge by with the nearest image to learn from, if it is a copy. Two images
    that the store keeps are left out: an earlier version had advice on them, and both would have to
    be decoded."""
    if not len(judged) or not len(learnt):
        return []
    # A common mean would make all embeddings look alike.
    shift_W = learnt_NW.mean(axis=0)
    ours_MW, theirs_NW = _unit(judged_MW - shift_W), _unit(learnt_NW - shift_W)
    nearest = []
    for start in range(0, len(judged), ROWS_AT_ONCE):
        alike_PN = ours_MW[start : start + ROWS_AT_ONCE] @ theirs_NW.T
        nearest_P = alike_PN.argmax(axis=1)
        for row in np.flatnonzero(alike_PN.max(axis=1) >= _LEAST_COSINE):
            nearest.append((start + int(row), int(nearest_P[row])))
    pairs = []
    for ours, theirs in nearest:
        if judged.pictures.is_stored(ours) and learnt.pictures.is_stored(theirs):
            continue
        bits = (_hash(judged, ours) ^ _hash(learnt, theirs)).bit_count()
        if bits <= _MOST_BITS:
            pairs.append(_NearCopy(judged=ours, learnt=theirs, bits=bits))
    return sorted(pairs, key=lambda pair: (pair.bits, pair.judged))


def _hash(images: LabelledImages, row: int) -> int:
    pixels_1HWC = images.take(np.array([row], dtype=np.int64)).pixels_NHWC
    return dhash(Image.fromarray(pixels_1HWC[0]))


def _unit(embeddings_NW: Doubles) -> Doubles:
    length_N1 = np.linalg.norm(embeddings_NW, axis=1, keepdims=True)
    return np.asarray(embeddings_NW / np.maximum(length_N1, 1e-12))


_EXPONENT = 0.75
"""From 20 images on, forecasts with 1 are a third too low on average, and with 0.5 a quarter too
high."""
_FEWEST_MORE, _MOST_MORE, _STEP = 5, 50, 5


def slopes(sizes_CS: Doubles, errors_CS: Doubles) -> Doubles:
    """Fit the slope of each class by least squares; 0 where errors do not fall, NaN without any."""
    inverse_CS = np.maximum(sizes_CS, 1) ** -_EXPONENT
    centred_CS = inverse_CS - inverse_CS.mean(axis=1, keepdims=True)
    spread_C = np.square(centred_CS).sum(axis=1)
    found_C = (centred_CS * errors_CS).sum(axis=1) / np.where(spread_C > 0, spread_C, np.inf)
    return np.asarray(np.maximum(found_C, 0.0))


def gain(slope: float, *, error: float, images: int, more: int) -> float:
    """Return what `more` images beside the `images` of a class take from its error."""
    fall = float(images**-_EXPONENT - (images + more) ** -_EXPONENT)
    return min(slope * fall, error)


def how_many_more(images_by_class: list[int]) -> int:
    """Choose one number for all classes: half of what a class has, so that they can be compared."""
    half = float(np.median(images_by_class)) / 2
    return int(min(_MOST_MORE, max(_FEWEST_MORE, _STEP * round(half / _STEP))))


Floats = NDArray[np.float32]

_NO_TOKENS = Advice(
    notes=(
        "Nothing can be said without a pre-trained start: the experts have learnt from these very "
        "images, and take every label for right.",
    )
)
ONE_CLASS = "With one class there is nothing to tell apart."
ALL_ALIKE = "No class has enough different images to leave some out."


@dataclass(frozen=True, slots=True, kw_only=True)
class AtHand:
    """Images with their embeddings, and embeddings of classes that have lost images."""

    learnt: LabelledImages
    learnt_NW: Floats
    judged: LabelledImages
    judged_NW: Floats
    lost_NW: Floats
    """Embeddings in the place of all images of these classes: learnt from, and not judged."""
    lost_N: Labels
    kept: Mapping[str, int]
    """The number of images that a class had, where it has lost some."""


def advise(at_hand: AtHand) -> Advice:
    """Say what would help most, and what cannot be said."""
    images = join(at_hand.learnt, at_hand.judged)
    copies, all_copies = _copies(at_hand)
    embeddings_NW = np.concatenate([at_hand.learnt_NW, at_hand.judged_NW, at_hand.lost_NW])
    labels_N = np.concatenate([images.labels_N, at_hand.lost_N])
    places = np.unique(labels_N)
    doubles_NW, among_N = embeddings_NW.astype(np.float64), np.searchsorted(places, labels_N)
    left_out = leave_out(doubles_NW, among_N, may_judge_N=np.arange(len(labels_N)) < len(images))
    names = [images.classes[place] for place in places]
    only_copies = Advice(copies=copies, copies_in_all=all_copies)
    if left_out is None:
        why = ONE_CLASS if len(places) < 2 else ALL_ALIKE
        return only_copies.model_copy(update={"notes": (why,)})
    study = _Study(
        names=names, images=images, labels_N=among_N, embeddings_NW=doubles_NW, left_out=left_out
    )
    suspects, all_suspects = study.suspects()
    return only_copies.model_copy(
        update={
            "classes": study.classes(at_hand),
            "confused": study.confused(),
            "suspects": suspects,
            "suspects_in_all": all_suspects,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Study:
    """Left-out images and what was said of them. Labels are places in `names`."""

    names: list[str]
    images: LabelledImages
    labels_N: Labels
    embeddings_NW: NDArray[np.float64]
    left_out: LeftOut

    def classes(self, at_hand: AtHand) -> tuple[ClassAdvice, ...]:
        """Forecast each class, those that gain most first."""
        slope_C = slopes(self.left_out.sizes_CS, self.left_out.errors_CS)
        learnt = at_hand.learnt.images_by_class
        counts = [learnt[name] for name in self.names if learnt[name]]
        more = how_many_more(counts) if counts else 0
        rows = [
            self._class(place, learnt[name], float(slope_C[place]), more, at_hand)
            for place, name in enumerate(self.names)
        ]
        return tuple(sorted(rows, key=lambda row: -(row.gain if row.gain is not None else -1.0)))

    def _class(
        self, place: int, images: int, slope: float, more: int, at_hand: AtHand
    ) -> ClassAdvice:
        name, error = self.names[place], float(self.left_out.errors_CS[place, -1])
        if np.isnan(error) or not images:
            why = self._why_not(place, at_hand)
            return ClassAdvice(class_name=name, images=images, accuracy=None, why=why)
        more = min(more, images)  # twice as many images are as far as a forecast goes
        forecast = gain(slope, error=error, images=images, more=more)
        return ClassAdvice(
            class_name=name, images=images, accuracy=1 - error, more=more, gain=forecast
        )

    def _why_not(self, place: int, at_hand: AtHand) -> str:
        name, rows = self.names[place], np.flatnonzero(self.labels_N == place)
        if name in at_hand.kept:
            kept = counted(at_hand.kept[name], "image")
            return f"the store no longer has all of its {kept}"
        different = len(np.unique(distinct(self.embeddings_NW[rows])))
        has = counted(different, "different image")
        return f"it has {has} at hand, and {FEWEST_IMAGES} are needed"

    def suspects(self) -> tuple[tuple[Suspect, ...], int]:
        doubted = doubt_labels(self.left_out, self.labels_N)
        chosen = np.flatnonzero(doubted.suspected_M)
        listed = tuple(
            Suspect(
                image=_named(self.images, int(doubted.rows_M[place]), shows=rank < _MOST_SHOWN),
                class_name=self.names[self.labels_N[doubted.rows_M[place]]],
                likelier=self.names[doubted.answers_M[place]],
                score=float(doubted.score_M[place]),
            )
            for rank, place in enumerate(chosen[:MAX_LISTED])
        )
        return listed, len(chosen)

    def confused(self) -> tuple[Confused, ...]:
        return tuple(
            Confused(
                class_name=self.names[pair.label],
                taken_for=self.names[pair.taken_for],
                count=len(pair.rows),
                images=tuple(
                    _named(self.images, int(row), shows=rank == 0) for row in pair.rows[:LOOKED_AT]
                ),
            )
            for rank, pair in enumerate(confusions(self.left_out, self.labels_N)[:MAX_LISTED])
        )


def _copies(at_hand: AtHand) -> tuple[tuple[Copy, ...], int]:
    pairs = _find_copies(
        at_hand.judged,
        at_hand.learnt,
        judged_MW=at_hand.judged_NW.astype(np.float64),
        learnt_NW=at_hand.learnt_NW.astype(np.float64),
    )
    listed = tuple(
        Copy(
            judged=_named(at_hand.judged, pair.judged, shows=rank < LOOKED_AT),
            learnt=_named(at_hand.learnt, pair.learnt, shows=rank < LOOKED_AT),
            class_name=at_hand.judged.classes[at_hand.judged.labels_N[pair.judged]],
            bits=pair.bits,
        )
        for rank, pair in enumerate(pairs[:MAX_LISTED])
    )
    return listed, len(pairs)


def _named(images: LabelledImages, row: int, *, shows: bool = True) -> AdvisedImage:
    """Name an image. To write it as the store keeps it takes milliseconds: `shows` is for images
    that people will look at."""
    name = images.names[row]
    stem = PurePosixPath(name).stem
    item = stem if re.fullmatch(ITEM_ID, stem) else None
    kept = hashlib.sha256(images.pictures.encoded(row)).hexdigest() if shows else None
    return AdvisedImage(name=item or _short(name), item=item, kept=kept)


def _short(name: str) -> str:
    """Keep the end of a long name, which tells files apart. Write lone surrogates as escapes."""
    told = name.encode("utf-8", "backslashreplace").decode()
    return told if len(told) <= MAX_NAME else f"…{told[1 - MAX_NAME :]}"


def advise_on(student: Student, *, data: TaskData, learnt: Learnt, cache: EmbeddingCache) -> Advice:
    """Advise on the version that a run makes. The embeddings are in the cache by now."""
    if learnt.tokens_NW is None or learnt.labels_N is None or learnt.real_N is None:
        return _NO_TOKENS
    width = student.network.spec.narrow_width
    lost = np.unique(learnt.labels_N[~learnt.real_N])
    stands_in_N = np.isin(learnt.labels_N, lost)
    training = _without(data.for_training, lost, data)
    judged = _without(data.judged_by, lost, data)
    known = {kept.entry.class_name: kept.entry.count for kept in data.statistics}
    known |= {name: kept.count for name, kept in learnt.statistics.items()}
    names = data.for_training.classes
    return advise(
        AtHand(
            learnt=training,
            learnt_NW=cache.embeddings(training)[:, :width],
            judged=judged,
            judged_NW=cache.embeddings(judged)[:, :width],
            lost_NW=learnt.tokens_NW[stands_in_N, :width],
            lost_N=learnt.labels_N[stands_in_N],
            kept={names[place]: known[names[place]] for place in lost},
        )
    )


def _without(images: LabelledImages, lost: NDArray[np.int64], data: TaskData) -> LabelledImages:
    """Leave out retired classes, and classes that have lost images."""
    retired = [images.classes.index(name) for name in data.retired]
    rows = np.flatnonzero(~np.isin(images.labels_N, [*lost.tolist(), *retired]))
    return images.take(rows.astype(np.int64))
