"""Define the part that methods on frozen features share: only the first task changes a backbone.

N images, D features, C classes.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor, nn

from lab.batches import over_batches
from lab.method import Lesson, Options
from lab.plain import PlainMethod
from lab.presets import Preset
from trainer.data.folders import LabelledImages


class FrozenMethod(PlainMethod):
    """A method that answers from the features of the first task's network."""

    def __init__(self, preset: Preset, options: Options) -> None:
        super().__init__(preset, options)
        self.classes = 0

    def expand(self, new: tuple[str, ...]) -> None:
        if self.classes:
            del self.network.heads[:]  # only the first task has learnt with a head
        else:
            self.network.heads.grow(len(new))
        self.classes += len(new)

    def learn(self, lesson: Lesson) -> None:
        if lesson.start is not None and lesson.task == 0:
            self.begin(lesson)
        elif lesson.task == 0:
            self.learn_network(lesson)

    def remember(self, exemplars: LabelledImages | None, lesson: Lesson) -> None:
        """Learn from the features of the new images. No older image is needed."""
        new = lesson.images.take(np.flatnonzero(lesson.images.labels_N >= lesson.old))
        features_ND = over_batches(
            new.pixels_NHWC, self.features, preprocessing=lesson.preprocessing
        )
        self.learn_from(torch.from_numpy(features_ND), torch.from_numpy(new.labels_N), lesson)

    @abstractmethod
    def learn_from(self, features_ND: Tensor, labels_N: Tensor, lesson: Lesson) -> None:
        """Learn the new classes from the features of their images."""


def with_rows(known: Tensor, count: int) -> Tensor:
    """Append rows of zeros for new classes."""
    return torch.cat((known, known.new_zeros(count, *known.shape[1:])))


def constant(values: Tensor) -> nn.Parameter:
    """Make a parameter that no gradient changes: an answer needs it, so it is counted."""
    return nn.Parameter(values, requires_grad=False)
