"""Fit all heads to the tokens of experts that are final."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from model_store.records.manifest import Scalar
from model_store.spec import NetworkSpec
from model_store.tables import counted
from model_store.worth import CROSS_VALIDATED
from trainer.data.folders import LabelledImages
from trainer.data.groups import numbers_of
from trainer.data.task_data import TaskData
from trainer.embeddings.cache import EmbeddingCache, Floats
from trainer.embeddings.statistics import ClassStatistics, Gathered, decode, gather, take_out
from trainer.evaluation.price import NO_PRICE, Price, price_of
from trainer.fitting.choice import Choice
from trainer.growth.carried import carry
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.classifier import Fitted, Given, fit_classifier, try_readouts
from trainer.learning.losses import classification_named
from trainer.learning.student import Learnt, Student
from trainer.learning.token_reading import parent_cache_of, read_tokens
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, Ranks
from trainer.request import Learning

FITTING = "fitting the classifier"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFit:
    """A student whose experts are final, and the images that its heads are fitted to."""

    student: Student
    data: TaskData
    request: Learning
    progress: Progress
    checkpoint: Checkpoint | None
    ranks: Ranks = ALONE

    @property
    def images(self) -> LabelledImages:
        return self.data.for_training

    def run(self) -> Learnt:
        """Fit all heads to the tokens at hand, and to stand-ins for images that are gone."""
        student, request, retired = self.student, self.request, self.data.retired
        tokens_NW, cache = read_tokens(
            student,
            self.images,
            folder=request.tokens,
            progress=self.progress,
            # The last checkpoint of an adaptation has its changes, which all tokens follow from.
            checkpoint=None if student.aim == "adaptation" else self.checkpoint,
            ranks=self.ranks,
        )
        figures: dict[str, Scalar] = {}
        if student.readout_is_open:
            tokens_NW, cache, figures = self._choose_readout(tokens_NW, cache)
        if self.ranks.rank:
            return Learnt(cache=cache)
        width = student.network.spec.slice_width(0)
        known = self._known_statistics(width)
        if student.aim == "adaptation":
            known = self._carried(known, tokens_NW)
        taken_out = self._taken_out(known, cache, width)
        known = {**known, **taken_out}
        gathered = gather(
            tokens_NW,
            self.images.labels_N,
            classes=self.images.classes,
            new=0 if student.aim in ("deepening", "adaptation") else self.data.new_images,
            width=width,
            known=known,
        )
        gathered = gathered.without(retired)
        if gathered.narrow and tokens_NW.shape[1] > width:
            self.progress.note(
                "with so few images the classifier reads the pre-trained expert only: they do not "
                "tell the channels of younger experts for images that are gone"
            )
        with self.progress.phase(FITTING, total=0):
            given = self._given(gathered)
            fitted = fit_classifier(student.network, given, former=student.before)
        assert given.groups_N is not None
        return Learnt(
            cache=cache,
            training={**figures, **_told(fitted.choice, student.network.spec)},
            statistics={
                **(known if student.aim == "adaptation" else taken_out),
                **gathered.changed,
            },
            tokens_NW=gathered.embeddings_NV,
            labels_N=gathered.labels_N,
            real_N=gathered.real_N,
            groups_N=np.where(gathered.real_N, given.groups_N, -1),
            price=self._price(fitted, given, gathered),
            fitted_on=self._fitted_on(given, fitted.choice),
        )

    def _taken_out(
        self, known: Mapping[str, ClassStatistics], cache: EmbeddingCache, width: int
    ) -> dict[str, ClassStatistics]:
        """Take images that left their class out of its statistics."""
        gone = self.data.gone
        left: dict[str, ClassStatistics] = {}
        for name in known if gone is not None else ():
            assert gone is not None
            rows = gone.rows_of(name)
            if len(rows):
                left[name] = take_out(known[name], cache.embeddings(gone.take(rows))[:, :width])
        return left

    def _price(self, fitted: Fitted, given: Given, gathered: Gathered) -> Price:
        """Estimate what more classes cost the old ones. Images that belong together count once.

        Images that the expert was adapted to tell no fit, but a price: it is too low, if at all.
        """
        if self.student.aim != "head" or given.judged_N is None:
            return NO_PRICE
        left_out, judged_N = fitted.left_out, given.judged_N
        if self.student.adapted_before:
            judged_N = gathered.real_N
            spec = self.student.network.spec
            left_out = given.left_out(spec, fitted.choice, judged_N=judged_N)
        price = price_of(left_out, newest=self.student.new_classes)
        alone = _alone(replace(given, judged_N=judged_N))
        return price.each_counting(alone / max(1, int(judged_N.sum())))

    def _given(self, gathered: Gathered) -> Given:
        groups_N = numbers_of(self.images)
        # Every stand-in is a group of its own, and none is left out.
        alone_N = len(groups_N) + np.arange(len(gathered.rows_N))
        return Given(
            tokens_NV=gathered.embeddings_NV,
            labels_N=gathered.labels_N,
            answered=self._answered,
            loss=classification_named(self.request.loss),
            judged_N=self._unseen_N(gathered),
            groups_N=np.where(gathered.real_N, groups_N[gathered.rows_N], alone_N),
        )

    def _fitted_on(self, given: Given, fitted: Choice) -> int:
        """Count the images that gave a temperature: held-out ones have to undo one of images that
        an expert was adapted to."""
        if fitted.by_sample or self.student.aim == "adaptation":
            return 0
        return _alone(given)

    def _unseen_N(self, gathered: Gathered) -> NDArray[np.bool_]:
        """Tell which tokens can judge a classifier: not those of images to which the expert was
        adapted, as long as there are others. New images come first."""
        new = self.data.new_images
        if self.student.aim != "head" or not self.student.adapted_before or not new:
            return gathered.real_N
        return gathered.real_N & (gathered.rows_N < new)

    @property
    def _answered(self) -> list[int]:
        return [
            place for place, name in enumerate(self.images.classes) if name not in self.data.retired
        ]

    def _choose_readout(
        self, tokens_NW: Floats, cache: EmbeddingCache
    ) -> tuple[Floats, EmbeddingCache, dict[str, Scalar]]:
        """Keep the readout of earlier blocks if left-out images are likelier with it."""
        network, widens, figures = self.student.network, False, dict[str, Scalar]()
        if self.ranks.rank == 0:
            found = try_readouts(
                network.spec,
                Given(
                    tokens_NV=tokens_NW,
                    labels_N=self.images.labels_N,
                    answered=self._answered,
                    loss=classification_named(self.request.loss),
                    groups_N=numbers_of(self.images),
                ),
            )
            widens = found.widens
            figures = {
                "cross_validation_narrow": rounded(found.narrow.choice.accuracy),
                "cross_validation_wide": rounded(found.wide.choice.accuracy),
            }
        widens = self.ranks.from_first(bytes([widens])) != bytes([False])
        if widens:
            return tokens_NW, cache, figures
        network.narrow()
        narrow_NW = np.ascontiguousarray(tokens_NW[:, : network.spec.token_width])
        return narrow_NW, cache.narrowed(network), figures

    def _carried(
        self, known: Mapping[str, ClassStatistics], tokens_NW: Floats
    ) -> dict[str, ClassStatistics]:
        """Carry the statistics of classes that have lost images over to the adapted expert."""
        student, images = self.student, self.images
        left = {name: len(images.rows_of(name)) for name in known}
        lost = {name: one for name, one in known.items() if left[name] < one.count}
        if not lost:
            return {}
        self.progress.note(
            f"{counted(len(lost), 'class has', 'classes have')} lost images: a map that is fitted "
            f"to {counted(len(images), 'image')} carries their statistics over, and they lose more "
            "than classes with images"
        )
        before = parent_cache_of(student, folder=self.request.tokens)
        assert before is not None, "an adaptation has a parent"
        return carry(
            lost,
            before_NW=before.embeddings(images),
            after_NW=tokens_NW,
            labels_N=images.labels_N,
            classes=images.classes,
        )

    def _known_statistics(self, width: int) -> dict[str, ClassStatistics]:
        return {
            kept.entry.class_name: decode(
                kept.entry.shard, kept.data, count=kept.entry.count, width=width
            )
            for kept in self.data.statistics
        }


def _alone(given: Given) -> int:
    """Count the images that tell a temperature: those that belong together count as one."""
    assert given.groups_N is not None
    assert given.judged_N is not None
    return len(np.unique(given.groups_N[given.judged_N]))


def _told(fitted: Choice, spec: NetworkSpec) -> dict[str, Scalar]:
    """Give the figures of a fit for the record of a version."""
    return {
        "fit": fitted.method,
        "strength": fitted.strength,
        CROSS_VALIDATED: rounded(fitted.accuracy),
        "readout": "narrow" if spec.readout is None else "wide",
    }


def rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
