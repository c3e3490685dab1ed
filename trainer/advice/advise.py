"""Put the advice on a version together: from tokens and labels of the images at hand.

Only the oldest expert's slice of a token is read. Younger experts have learnt from these very
images, and would take every label for right. N images, W channels of that slice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from model_store.advice.record import (
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
from model_store.layout import ITEM_ID
from model_store.tables import counted
from trainer.advice.copies import find_copies
from trainer.advice.forecast import gain, how_many_more, slopes
from trainer.advice.left_out import FEWEST_IMAGES, Labels, LeftOut, distinct, leave_out
from trainer.advice.suspects import confusions, doubt_labels
from trainer.data.folders import LabelledImages, join

Floats = NDArray[np.float32]

NO_TOKENS = Advice(
    notes=(
        "Nothing can be said without a pre-trained start: the experts have learnt from these very "
        "images, and take every label for right.",
    )
)
ONE_CLASS = "With one class there is nothing to tell apart."
ALL_ALIKE = "No class has enough different images to leave some out."


@dataclass(frozen=True, slots=True, kw_only=True)
class AtHand:
    """Images with their tokens, and tokens of classes that have lost images."""

    learnt: LabelledImages
    learnt_NW: Floats
    judged: LabelledImages
    judged_NW: Floats
    lost_NW: Floats
    """Tokens that stand for all images of these classes. They are learnt from and not judged."""
    lost_N: Labels
    kept: Mapping[str, int]
    """The number of images that a class had, where it has lost some."""


def advise(at_hand: AtHand) -> Advice:
    """Say what would help most, and what cannot be said."""
    images = join(at_hand.learnt, at_hand.judged)
    copies, all_copies = _copies(at_hand)
    tokens_NW = np.concatenate([at_hand.learnt_NW, at_hand.judged_NW, at_hand.lost_NW])
    labels_N = np.concatenate([images.labels_N, at_hand.lost_N])
    places = np.unique(labels_N)
    doubles_NW, among_N = tokens_NW.astype(np.float64), np.searchsorted(places, labels_N)
    left_out = leave_out(doubles_NW, among_N, may_judge_N=np.arange(len(labels_N)) < len(images))
    names = [images.classes[place] for place in places]
    only_copies = Advice(copies=copies, copies_in_all=all_copies)
    if left_out is None:
        why = ONE_CLASS if len(places) < 2 else ALL_ALIKE
        return only_copies.model_copy(update={"notes": (why,)})
    study = _Study(
        names=names, images=images, labels_N=among_N, tokens_NW=doubles_NW, left_out=left_out
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
    tokens_NW: NDArray[np.float64]
    left_out: LeftOut

    def classes(self, at_hand: AtHand) -> tuple[ClassAdvice, ...]:
        """Forecast each class, those that gain most first."""
        slope_C = slopes(self.left_out.sizes_CS, self.left_out.errors_CS)
        learnt = at_hand.learnt.images_by_class
        counts = [learnt[name] for name in self.names if learnt[name]]
        more = how_many_more(counts) if counts else 0
        found = [
            self._class(place, learnt[name], float(slope_C[place]), more, at_hand)
            for place, name in enumerate(self.names)
        ]
        return tuple(sorted(found, key=lambda one: -(one.gain if one.gain is not None else -1.0)))

    def _class(
        self, place: int, images: int, slope: float, more: int, at_hand: AtHand
    ) -> ClassAdvice:
        name, error = self.names[place], float(self.left_out.errors_CS[place, -1])
        if np.isnan(error) or not images:
            why = self._why_not(place, at_hand)
            return ClassAdvice(class_name=name, images=images, accuracy=None, why=why)
        more = min(more, images)  # twice as many images are as far as a forecast goes
        found = gain(slope, error=error, images=images, more=more)
        return ClassAdvice(
            class_name=name, images=images, accuracy=1 - error, more=more, gain=found
        )

    def _why_not(self, place: int, at_hand: AtHand) -> str:
        name, rows = self.names[place], np.flatnonzero(self.labels_N == place)
        if name in at_hand.kept:
            kept = counted(at_hand.kept[name], "image")
            return f"the store has no longer all of its {kept}"
        different = len(np.unique(distinct(self.tokens_NW[rows])))
        has = counted(different, "different image")
        return f"it has {has} at hand, and {FEWEST_IMAGES} are needed"

    def suspects(self) -> tuple[tuple[Suspect, ...], int]:
        doubted = doubt_labels(self.left_out, self.labels_N)
        chosen = np.flatnonzero(doubted.suspected_M)
        listed = tuple(
            Suspect(
                image=_named(self.images, int(doubted.rows_M[one])),
                class_name=self.names[self.labels_N[doubted.rows_M[one]]],
                likelier=self.names[doubted.answers_M[one]],
                score=float(doubted.score_M[one]),
            )
            for one in chosen[:MAX_LISTED]
        )
        return listed, len(chosen)

    def confused(self) -> tuple[Confused, ...]:
        return tuple(
            Confused(
                class_name=self.names[pair.label],
                taken_for=self.names[pair.taken_for],
                count=len(pair.rows),
                images=tuple(_named(self.images, int(row)) for row in pair.rows[:LOOKED_AT]),
            )
            for pair in confusions(self.left_out, self.labels_N)[:MAX_LISTED]
        )


def _copies(at_hand: AtHand) -> tuple[tuple[Copy, ...], int]:
    pairs = find_copies(
        at_hand.judged,
        at_hand.learnt,
        judged_MW=at_hand.judged_NW.astype(np.float64),
        learnt_NW=at_hand.learnt_NW.astype(np.float64),
    )
    listed = tuple(
        Copy(
            judged=_named(at_hand.judged, pair.judged),
            learnt=_named(at_hand.learnt, pair.learnt),
            class_name=at_hand.judged.classes[at_hand.judged.labels_N[pair.judged]],
            bits=pair.bits,
        )
        for pair in pairs[:MAX_LISTED]
    )
    return listed, len(pairs)


def _named(images: LabelledImages, row: int) -> AdvisedImage:
    name = images.names[row]
    stem = PurePosixPath(name).stem
    item = stem if re.fullmatch(ITEM_ID, stem) else None
    return AdvisedImage(name=item or _short(name), item=item)


def _short(name: str) -> str:
    """Keep the end of a long name, which tells files apart. Write lone surrogates as escapes."""
    told = name.encode("utf-8", "backslashreplace").decode()
    return told if len(told) <= MAX_NAME else f"…{told[1 - MAX_NAME :]}"
