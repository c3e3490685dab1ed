"""Compute the training objective: classification + 0.1 × task expertise + 1 × distillation.

B images, C classes so far, O of them old, N new in this task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_store.errors import WrongUsage
from model_store.inference.forward import Lineage
from model_store.network.network import Network


class Learner(Protocol):
    """A network that learns. `Network` is one; a module with these members is another."""

    @property
    def device(self) -> torch.device: ...

    def learnable(self) -> list[nn.Parameter]:
        """List the parameters that any phase of learning the task may change."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...


AnyLearner = TypeVar("AnyLearner", bound=Learner)
Learns = TypeVar("Learns", contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    loss: Tensor
    right: Tensor
    """The number of right answers before this step."""


class BatchLoss(Protocol[Learns]):
    """The loss of a batch of normalised images."""

    def __call__(self, network: Learns, images_BCHW: Tensor, labels_B: Tensor, /) -> Step: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """The weights of the parts of the objective."""

    classification: float = 1.0
    expertise: float = 0.1
    distillation: float = 1.0


class Classification(Protocol):
    def __call__(
        self, logits_BC: Tensor, labels_B: Tensor, *, weights_B: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss of a batch's images, or their sum with these weights."""


def cross_entropy(
    logits_BC: Tensor, labels_B: Tensor, *, weights_B: Tensor | None = None
) -> Tensor:
    if weights_B is None:
        return F.cross_entropy(logits_BC, labels_B)
    return weights_B @ F.cross_entropy(logits_BC, labels_B, reduction="none")


def binary(logits_BC: Tensor, labels_B: Tensor, *, weights_B: Tensor | None = None) -> Tensor:
    """Sum the binary cross-entropies of all classes: this class or not."""
    asked = F.one_hot(labels_B, logits_BC.shape[1]).to(logits_BC.dtype)
    if weights_B is None:
        return F.binary_cross_entropy_with_logits(logits_BC, asked, reduction="sum") / len(labels_B)
    each_BC = F.binary_cross_entropy_with_logits(logits_BC, asked, reduction="none")
    return weights_B @ each_BC.sum(dim=1)


CLASSIFICATIONS: dict[str, Classification] = {"cross-entropy": cross_entropy, "binary": binary}


def classification_named(name: str) -> Classification:
    if name not in CLASSIFICATIONS:
        raise WrongUsage(f"loss {name!r} is not one of {', '.join(CLASSIFICATIONS)}")
    return CLASSIFICATIONS[name]


def expertise(auxiliary_logits: Tensor, labels_B: Tensor, *, old_classes: int) -> Tensor:
    """Keep the new expert on its task: tell new classes apart, and all old ones as output 0."""
    return F.cross_entropy(auxiliary_logits, (labels_B - old_classes + 1).clamp_min(0))


def distillation(student_BO: Tensor, teacher_BO: Tensor) -> Tensor:
    """Return the KL divergence of student from teacher, over the old classes."""
    return F.kl_div(
        F.log_softmax(student_BO, dim=-1),
        F.log_softmax(teacher_BO, dim=-1),
        reduction="batchmean",
        log_target=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The parent: the frozen experts that the network still holds, and the heads it had."""

    heads: nn.ModuleList
    classes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss of one batch, from one forward pass for student, teacher and auxiliary head."""

    classification: Classification
    teacher: Teacher | None = None
    auxiliary: nn.Linear | None = None
    frozen: Lineage | None = None
    """The experts that do not learn, folded: all but the newest, or all."""
    log_counts_C: Tensor | None = None
    """The logarithms of the images that an epoch has of each class. They are added to the logits in
    the loss alone (balanced softmax), so a class with few images is not answered more rarely. None:
    nothing is added."""
    weights: LossWeights = LossWeights()

    def __call__(self, network: Network, images_BCHW: Tensor, labels_B: Tensor) -> Step:
        return self.of_slices(network, self.token_slices(network, images_BCHW), labels_B)

    def of_slices(self, network: Network, slices: list[Tensor], labels_B: Tensor) -> Step:
        """Compute the loss from the slices of the token."""
        logits = network.classify(slices)
        prior_C = self.log_counts_C
        in_loss = logits if prior_C is None else logits + prior_C
        loss = self.weights.classification * self.classification(in_loss, labels_B)
        if self.teacher is not None:
            old = self.teacher.classes
            with torch.no_grad():
                taught = network.classify(slices[:-1], self.teacher.heads)
            loss = loss + self.weights.distillation * distillation(logits[:, :old], taught)
            if self.auxiliary is not None:
                asked = self.auxiliary(torch.cat(slices, dim=-1))
                if prior_C is not None:
                    asked = asked + torch.cat((prior_C[:old].logsumexp(0)[None], prior_C[old:]))
                expert_loss = expertise(asked, labels_B, old_classes=old)
                loss = loss + self.weights.expertise * expert_loss
        right = (logits.detach().argmax(dim=-1) == labels_B).sum()
        return Step(loss=loss, right=right)

    def token_slices(self, network: Network, images_BCHW: Tensor) -> list[Tensor]:
        if self.frozen is None:
            return network.token_slices(images_BCHW)
        if len(self.frozen.spec.experts) == len(network.spec.experts):
            return [self.frozen.token(images_BCHW)]
        return network.token_slices(images_BCHW, self.frozen.frozen_context(images_BCHW))
