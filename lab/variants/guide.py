"""Guide a new expert by features that know no labels, after TagFex (CVPR 2025). Training only.

A small expert of its own, the guide, learns by contrast: two changed views of an image have
similar embeddings. The new expert's token reads the guide's patches by attention, a classifier of
the new classes reads the merged feature, and its answers are taught to the network while they are
better. Simpler than TagFex: the guide begins anew with every task from the second on, so nothing
is distilled from an older guide; one head of attention reads from the token, not from every
patch; the second view is the first one, changed again.

Shapes: B images, P patches, C channels of the guide and of the new expert, N new classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.variants.alone import patches
from lab.variants.drop_path import Draws
from model_store.network.network import Network
from model_store.preprocess import Normalisation
from model_store.spec import TaskSpec
from trainer.data.augment import Augmentation
from trainer.learning.losses import Objective, Step, distillation

TEMPERATURE = 0.2
EMBEDDING = 64
CHANGES = Augmentation(crop=True, flip=True, rand_augment=True)


class Guide(nn.Module):
    """An expert without labels, and the attention by which the new expert's token reads it."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        newest = network.spec.tasks[-1]
        alone = TaskSpec(name="guide", classes=newest.classes, expert=newest.expert)
        spec = network.spec.until(0).expand(alone)
        self.expert = network.expert_type(spec, index=0)
        width = spec.width_of(0)
        self.projector = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, EMBEDDING)
        )
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.of_guide, self.of_token = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.classifier = nn.Linear(width, len(newest.classes))
        self.draws = Draws()

    def features(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the patches [B, P, C] and the embeddings [B, E]."""
        x_BPC = patches(self.expert, images_BCHW)
        last = self.expert.last_block
        token = last.mix(last.attend(self.expert.with_token(x_BPC), queries=1), []).out
        return x_BPC, self.projector(self.expert.norm(token.squeeze(1)))

    def merged(self, token_BC: Tensor, patches_BPC: Tensor) -> Tensor:
        """Classify what the token reads of the guide's patches and of itself: [B, N]."""
        own_B1C = token_BC.unsqueeze(1)
        read = (self.of_guide(self.norm(patches_BPC)), self.of_token(own_B1C))
        keys, values = torch.cat(read, dim=1).chunk(2, dim=-1)
        mixed = F.scaled_dot_product_attention(self.query(own_B1C), keys, values)
        logits: Tensor = self.classifier(mixed.squeeze(1))
        return logits


class Guided(nn.Module):
    """The network and its guide, as one learner."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network, self.guide = network, Guide(network).to(network.device)

    @property
    def device(self) -> torch.device:
        return self.network.device

    def learnable(self) -> list[nn.Parameter]:
        return [*self.network.learnable(), *self.guide.parameters()]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedObjective:
    """The loss of the network, the guide's contrast, and the transfer from one to the other."""

    objective: Objective
    old: int
    normalisation: Normalisation[Tensor]

    def __call__(self, learner: Guided, images_BCHW: Tensor, labels_B: Tensor) -> Step:
        network, guide = learner.network, learner.guide
        slices = self.objective.token_slices(network, images_BCHW)
        step = self.objective.of_slices(network, slices, labels_B)
        both = torch.cat((images_BCHW, self._changed_again(images_BCHW, guide.draws)))
        patches_BPC, embeddings = guide.features(both)
        loss = step.loss + contrast(embeddings)
        new = labels_B >= self.old
        if new.any():
            patches_NPC = patches_BPC[: len(labels_B)][new].detach()
            merged = guide.merged(slices[-1][new], patches_NPC)
            logits = network.classify([one[new] for one in slices])[:, self.old :]
            loss = loss + transfer(logits, merged, labels_B[new] - self.old)
        return Step(loss=loss, right=step.right)

    def _changed_again(self, images_BCHW: Tensor, draws: Draws) -> Tensor:
        scaled = images_BCHW * self.normalisation.std + self.normalisation.mean
        changed = CHANGES(scaled.clamp(0, 1), draws.generator())
        return self.normalisation.standardise(changed)


def contrast(embeddings_ME: Tensor) -> Tensor:
    """Tell the other view of an image from all other views (InfoNCE); M = 2·B, views apart."""
    views = F.normalize(embeddings_ME, dim=-1)
    scores_MM = views @ views.T / TEMPERATURE
    scores_MM.fill_diagonal_(-torch.inf)
    return F.cross_entropy(scores_MM, torch.arange(len(views)).roll(len(views) // 2))


def transfer(logits_BN: Tensor, merged_BN: Tensor, labels_B: Tensor) -> Tensor:
    """Learn from merged features, and teach the network their answers while they are better."""
    merged_loss = F.cross_entropy(merged_BN, labels_B)
    if merged_loss >= F.cross_entropy(logits_BN, labels_B):
        return merged_loss
    return merged_loss + distillation(logits_BN, merged_BN.detach())
