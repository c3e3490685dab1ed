"""Fit the heads anew to final tokens, as the product does on a pre-trained start.

Experts are frozen, so the channels of a class that was learnt with expert t never change: count,
mean and scatter of them stand for images that are gone. A stand-in takes the channels of younger
experts from exemplars of its class, in turn.

N tokens, W channels, C classes of a task, V channels when the task was learnt.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_store.errors import WrongUsage
from model_store.network.network import Network
from trainer.embeddings.statistics import ClassStatistics, accumulate, stand_ins
from trainer.learning.classifier import Given, fit_classifier
from trainer.learning.losses import Classification

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


class TaskStatistics(nn.Module):
    """The statistics of the tokens of the classes of one task, as buffers."""

    counts_C: Tensor
    means_CV: Tensor
    factors_CVV: Tensor

    def __init__(self, *, classes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("counts_C", torch.zeros(classes, dtype=torch.int64))
        self.register_buffer("means_CV", torch.zeros(classes, width, dtype=torch.float64))
        self.register_buffer("factors_CVV", torch.zeros(classes, width, width, dtype=torch.float64))

    def keep(self, place: int, statistics: ClassStatistics) -> None:
        rows = len(statistics.factor_RW)
        self.counts_C[place] = statistics.count
        self.means_CV[place] = torch.from_numpy(statistics.mean_W)
        self.factors_CVV[place, :rows] = torch.from_numpy(statistics.factor_RW)

    def each(self) -> list[ClassStatistics]:
        return [
            ClassStatistics(
                count=int(self.counts_C[place]),
                mean_W=self.means_CV[place].numpy(),
                factor_RW=self.factors_CVV[place].numpy(),
            )
            for place in range(len(self.counts_C))
        ]


def keep_statistics(kept: TaskStatistics, tokens_NW: Floats, labels_N: Labels, *, old: int) -> None:
    """Keep the statistics of the classes from `old` on."""
    for place in range(len(kept.counts_C)):
        kept.keep(place, accumulate(tokens_NW[labels_N == old + place]))


def refit(
    network: Network,
    tokens_NW: Floats,
    labels_N: Labels,
    *,
    known: list[ClassStatistics],
    loss: Classification,
) -> None:
    """Fit all heads. The first classes have `known` statistics, in the place of their exemplars."""
    real_N = labels_N >= len(known)
    tokens, labels = [tokens_NW[real_N]], [labels_N[real_N]]
    for place, statistics in enumerate(known):
        made = with_younger(stand_ins(statistics, seed=place), tokens_NW[labels_N == place])
        tokens.append(made)
        labels.append(np.full(len(made), place))
    found_N = np.concatenate(labels)
    fit_classifier(
        network,
        Given(
            tokens_NV=np.concatenate(tokens),
            labels_N=found_N,
            answered=range(len(network.spec.classes)),
            loss=loss,
            judged_N=np.arange(len(found_N)) < real_N.sum(),
        ),
    )


def with_younger(made_MV: NDArray[np.float64], exemplars_LW: Floats) -> Floats:
    """Give stand-ins the channels of younger experts, from exemplars in turn."""
    if not len(exemplars_LW):
        raise WrongUsage("head=statistics needs an exemplar of each class: give a larger memory")
    turns_M = np.arange(len(made_MV)) % len(exemplars_LW)
    younger_MU = exemplars_LW[turns_M, made_MV.shape[1] :]
    return np.concatenate([made_MV.astype(np.float32), younger_MU], axis=1)
