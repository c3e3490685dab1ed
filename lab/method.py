"""Define the interface of a method, and the lesson that it learns a task from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lab.presets import Changes as ChangesName
from lab.presets import Preset
from model_store.records.manifest import Preprocessing
from trainer.backbones.pretrained import Pretrained
from trainer.data.augment import Augmentation, Changes, GentleChanges
from trainer.data.folders import LabelledImages
from trainer.data.sampling import DrawEpoch, evened
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.fit import OptimiserFactory, Schedule, fit
from trainer.learning.losses import AnyLearner, BatchLoss, Classification, cross_entropy
from trainer.learning.plan import Plan
from trainer.progress import Progress

CHANGES: Mapping[ChangesName, Changes] = {
    "standard": Augmentation(crop=True, flip=True, rand_augment=True),
    "light": Augmentation(crop=True, flip=True, rand_augment=False),
    "gentle": GentleChanges(flip=False),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BalancedSoftmax:
    """Cross-entropy of logits plus the logarithms of the class counts (Ren et al., 2020): the
    logits answer as if all classes had equally many images."""

    log_counts_C: Tensor

    def __call__(
        self, logits_BC: Tensor, labels_B: Tensor, *, weights_B: Tensor | None = None
    ) -> Tensor:
        return cross_entropy(logits_BC + self.log_counts_C, labels_B, weights_B=weights_B)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One task: the images of its classes and the exemplars, and the way to learn from them."""

    task: int
    new: tuple[str, ...]
    images: LabelledImages
    """The new images and the exemplars, or all images so far if the method `sees_all_images`.
    Labelled among all classes so far; the new classes come last."""
    preset: Preset
    preprocessing: Preprocessing
    seed: int
    progress: Progress
    start: Pretrained | None = None
    """The weights that a network begins with."""
    checkpoint: Checkpoint | None = None

    @property
    def classes(self) -> int:
        """Count the classes so far."""
        return len(self.images.classes)

    @property
    def old(self) -> int:
        """Count the classes of earlier tasks; their labels are below this number."""
        return self.classes - len(self.new)

    @property
    def epochs(self) -> int:
        return self.preset.epochs if self.task else self.preset.first_epochs

    @property
    def log_counts(self) -> Tensor | None:
        """Return the logarithms of class counts, where the loss is balanced and they differ."""
        counts_C = np.bincount(self.images.labels_N, minlength=self.classes)
        if self.preset.loss == "cross-entropy" or len(set(counts_C.tolist())) == 1:
            return None
        return torch.from_numpy(counts_C).float().log()

    @property
    def classification(self) -> Classification:
        """Return the loss of logits by the preset."""
        log_counts_C = self.log_counts
        return cross_entropy if log_counts_C is None else BalancedSoftmax(log_counts_C=log_counts_C)

    def fit(
        self,
        name: str,
        learner: AnyLearner,
        loss: BatchLoss[AnyLearner],
        *,
        parameters: Sequence[nn.Parameter],
        rate: float,
        epochs: int | None = None,
        draw_epoch: DrawEpoch | None = None,
        make_optimiser: OptimiserFactory | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        """Learn a phase. Phases of one lesson have different names.

        An interrupted phase goes on after its last epoch. For that, `learner.learnable()` lists
        the parameters that any phase of the lesson changes, in an order that does not depend on
        the phase, and every random start comes from `torch.manual_seed(lesson.seed)`.
        """
        fit(
            learner,
            self.images,
            parameters=parameters,
            objective=loss,
            plan=Plan(
                epochs=self.epochs if epochs is None else epochs,
                batch_size=self.preset.batch_size,
                learning_rate=rate,
            ),
            augment=CHANGES[self.preset.changes],
            preprocessing=self.preprocessing,
            draw_epoch=draw_epoch or evened(self.images, among=self.new),
            seed=self.seed,
            name=name,
            progress=self.progress,
            checkpoint=self.checkpoint,
            make_optimiser=make_optimiser,
            schedule=schedule,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a method. A method with variants has a subclass with a default for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroups:
    """Groups of pairs whose attention is told."""

    names: Sequence[str]
    measure: Callable[[Tensor], Tensor]
    """Compute the share and the mean of each group for images: [B, groups, 2]."""


class Method(nn.Module, ABC):
    """A class-incremental learner.

    All that it needs to answer is in its parameters and buffers. `expand` alone fixes their
    names and shapes, so that a run goes on from the saved tensors of its last task.
    """

    options_type: ClassVar[type[Options]] = Options
    sees_all_images: ClassVar[bool] = False
    """True for a bound on what can be learnt: lessons hold all images of earlier tasks."""

    def __init__(self, preset: Preset, options: Options) -> None:
        """Begin without classes. Subclasses narrow `options` to their `options_type`."""
        super().__init__()
        self.preset = preset

    @property
    def base(self) -> str | None:
        """Name the network, loss and way of learning of the first task; None: not to be shared.

        Methods of equal `base` learn the same first task, and only one of them has to.
        """
        return None

    def base_module(self) -> nn.Module:
        """Return the part that the first task changes; its tensors are named alike in a base."""
        return self

    @abstractmethod
    def expand(self, new: tuple[str, ...]) -> None:
        """Make room for the classes of one more task."""

    def skips(self, task: int, *, of: int) -> bool:
        """Return whether this task has no lesson and no line: a later one learns its classes."""
        return False

    @abstractmethod
    def learn(self, lesson: Lesson) -> None:
        """Learn the newest task. The caller freezes all parameters afterwards."""

    @abstractmethod
    def scores(self, images_BCHW: Tensor) -> Tensor:
        """Compute the scores [B, classes so far]; the largest one is the answer."""

    @abstractmethod
    def features(self, images_BCHW: Tensor) -> Tensor:
        """Compute the features [B, D] that exemplars are chosen by."""

    def remember(self, exemplars: LabelledImages | None, lesson: Lesson) -> None:
        """Take note of the exemplars that were chosen after a task; most methods need not."""

    @property
    def passes(self) -> int:
        """Count the passes through a backbone that an answer takes."""
        return 1

    def served_flop(self) -> int | None:
        """Count the operations of an answer in the form that is served, where there is one."""
        return None

    def attention(self) -> AttentionGroups | None:
        """Tell how to measure who attends to whom, where a variant is about that."""
        return None

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device
