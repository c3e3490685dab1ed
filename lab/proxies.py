"""Classify by several proxies a class, compared by cosine.

B images, C classes so far, K proxies a class, D features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PROXIES = 10
KMEANS_ROUNDS = 20


class ProxyClassifier(nn.Module):
    """Score a class by the cosines of its proxies, weighted by their softmax, times a scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.proxies = nn.ParameterList()
        """The proxies [classes, K, D] of each task."""
        self.scale = nn.Parameter(torch.ones(()))

    def expand(self, classes: int) -> None:
        drawn = torch.randn(classes, PROXIES, self.width)
        self.proxies.append(nn.Parameter(F.normalize(drawn, dim=-1)))

    def forward(self, features_BD: Tensor) -> Tensor:
        proxies_CKD = F.normalize(torch.cat(list(self.proxies)), dim=-1)
        cosines = F.normalize(features_BD, dim=-1) @ proxies_CKD.flatten(0, 1).T
        cosines_BCK = cosines.view(len(features_BD), -1, PROXIES)
        return self.scale * (cosines_BCK.softmax(dim=-1) * cosines_BCK).sum(dim=-1)


def nca(scores_BC: Tensor, labels_B: Tensor, *, margin: float) -> Tensor:
    """Ask a score that exceeds the soft maximum of all other classes by a margin."""
    own_BC = F.one_hot(labels_B, scores_BC.shape[1]).bool()
    others_B = scores_BC.masked_fill(own_BC, -math.inf).logsumexp(dim=1)
    return (others_B - scores_BC[own_BC] + margin).clamp_min(0).mean()


def kmeans(points_ND: Tensor, *, count: int) -> Tensor:
    """Find centres [count, D]. A centre that loses all its points stays in its place."""
    start = torch.randperm(len(points_ND))[torch.arange(count) % len(points_ND)]
    centres = points_ND[start]
    for _ in range(KMEANS_ROUNDS):
        nearest_N = torch.cdist(points_ND, centres).argmin(dim=1)
        member_NK = F.one_hot(nearest_N, count).to(points_ND.dtype)
        sizes_K1 = member_NK.sum(dim=0)[:, None]
        means = member_NK.T @ points_ND / sizes_K1.clamp_min(1)
        centres = torch.where(sizes_K1 > 0, means, centres)
    return centres
