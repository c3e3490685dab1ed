"""The student: the network that learns, what it has to keep, and what learning brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from model_store.inference.fold import FoldedExpert, fold_expert
from model_store.inference.forward import Lineage
from model_store.inference.stacks import stack_up
from model_store.network.network import Network
from model_store.records.manifest import Preprocessing, Scalar
from model_store.spec import NetworkSpec
from trainer.embeddings.cache import EmbeddingCache
from trainer.embeddings.statistics import ClassStatistics
from trainer.evaluation.price import NO_PRICE, Price
from trainer.learning.losses import Teacher

Aim = Literal["expert", "head", "extension", "deepening", "adaptation"]
"""A student adds one of these: a task with its expert; a task with a head only; more images of
known classes; an expert for tasks that have none; changes of the first expert, its only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Student:
    """The network that learns."""

    network: Network
    aim: Aim
    preprocessing: Preprocessing
    new_classes: tuple[str, ...]
    """The classes to learn; in an extension, known classes with more images; in a deepening, the
    classes of the tasks that get an expert; in an adaptation, all classes."""
    before: nn.ModuleList | None = None
    """The parent's heads; None for a first version."""
    origin: dict[str, Scalar] = field(default_factory=dict)
    """The source of the newest expert's weights, for the record; empty for random weights."""
    frozen: tuple[FoldedExpert, ...] = ()
    """The experts that do not learn, folded once for all passes over images."""
    parent: Network | None = None
    """The parent's network, where its experts are not those of the student: in an adaptation."""
    served: nn.ModuleList | None = None
    """The heads of the version that the channel names, where the gate has refused the parent."""
    adapted_before: bool = False
    """The first expert was adapted to older classes, so their images are right more often than
    others of them."""

    readout_is_open: bool = False
    """The network reads earlier blocks too, unless cross-validation says that it need not."""

    @property
    def on_pretrained(self) -> bool:
        return self.network.spec.is_pretrained

    @property
    def knows_all(self) -> bool:
        """Return whether the parent answers every class: then each has to be as good as before."""
        return self.aim in ("extension", "deepening", "adaptation")

    @property
    def adds_expert(self) -> bool:
        return self.aim in ("expert", "deepening")

    @property
    def grows(self) -> bool:
        """Return whether an expert learns beside a pre-trained one, or changes of that one."""
        return self.aim == "adaptation" or (self.on_pretrained and bool(self.frozen))

    @property
    def teacher(self) -> Teacher | None:
        """Return the part of the parent that an expert has to agree with: its older classes."""
        if self.before is None or self.on_pretrained:
            return None
        taught = self.network.spec.tasks[: len(self.before)]
        return Teacher(heads=self.before, classes=sum(len(task.classes) for task in taught))

    @property
    def given(self) -> list[nn.Parameter]:
        """List the parameters that came from a file: they are near their goal already."""
        return self.network.newest.learnable() if self.origin else []

    @property
    def learns_by_steps(self) -> bool:
        """Return whether an expert learns, or heads on features that no convex fit is made for."""
        if self.aim == "adaptation":
            return True
        if self.adds_expert:
            return bool(self.network.newest.learnable())
        return not self.on_pretrained

    def lineage(self) -> Lineage:
        """Fold the experts that learn, as they are, and put them after the frozen ones."""
        spec, begin = self.network.spec, len(self.frozen)
        return _lineage(spec, (*self.frozen, *folded(self.network, begin, len(spec.experts))))

    def frozen_lineage(self) -> Lineage | None:
        """Stack the frozen experts, if there are any: they answer alike in every step."""
        if not self.frozen:
            return None
        return _lineage(self.network.spec.until(len(self.frozen)), self.frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """The outcome of learning, besides the weights."""

    training: Mapping[str, Scalar] = field(default_factory=dict)
    """The figures of the run, for the record."""
    statistics: Mapping[str, ClassStatistics] = field(default_factory=dict)
    """Those of the classes that have new images; empty without a pre-trained start."""
    tokens_NW: NDArray[np.float32] | None = None
    """The tokens that the classifier was fitted to, stand-ins included, and their classes."""
    labels_N: NDArray[np.int64] | None = None
    real_N: NDArray[np.bool_] | None = None
    """False for stand-ins."""
    groups_N: NDArray[np.int64] | None = None
    """Images with one number belong together; -1 for stand-ins."""
    fitted_on: int = 0
    """The number of images that gave the classifier a temperature of its own, those that belong
    together counted once; 0 without one, and where a sample of them gave it."""
    price: Price = NO_PRICE
    """What more classes to choose among cost the old ones, by cross-validation."""
    cache: EmbeddingCache | None = None
    """The tokens that were read, if any were."""


def folded(network: Network, begin: int, end: int) -> tuple[FoldedExpert, ...]:
    """Fold the experts from `begin` up to and without `end`, as they are."""
    with torch.no_grad():
        return tuple(
            fold_expert(network.experts[index].state_dict(), spec=network.spec, index=index)
            for index in range(begin, end)
        )


def _lineage(spec: NetworkSpec, experts: Sequence[FoldedExpert]) -> Lineage:
    return Lineage(spec, first=experts[0], parts=stack_up(spec, experts))
