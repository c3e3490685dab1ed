"""Name all that learning in batches needs of a network and of its loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn


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
