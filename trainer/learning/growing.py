"""Grow a pre-trained network by steps: adapt its first expert by low-rank changes of all blocks, or
teach an expert that reads it. See ADR 94 and 97.

C classes that are answered.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from model_store.inference.forward import Lineage
from model_store.network.network import Network
from model_store.worth import growing_passes
from trainer.data.augment import Augmentation, Changes, GentleChanges
from trainer.data.folders import LabelledImages
from trainer.data.sampling import DrawEpoch
from trainer.data.task_data import TaskData
from trainer.embeddings.cache import Floats
from trainer.fitting.logistic import solve
from trainer.fitting.problem import Problem, variance_of
from trainer.growth.low_rank import change_layers, changes_of, merge_layers
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.fit import GREW, ChooseThreads, adamw, fit
from trainer.learning.losses import Step, cross_entropy
from trainer.learning.plan import LEARNING, Plan, rate_of
from trainer.learning.student import Student
from trainer.learning.token_reading import parent_cache_of
from trainer.progress import Progress
from trainer.ranks.ranks import Ranks
from trainer.ranks.threads import one_thread
from trainer.request import Effort, Learning

ADAPTING = "adapting"
LONGEST_EPOCH = 2000
"""Images in an epoch, and so the most work between two checkpoints."""
BATCH = 32
RATE = 2e-3
HEAD_RATE_SHARE = 0.5
SMOOTHING = 0.1
LONGEST_GRADIENT = 1.0
HEAD_L2_PENALTY = 0.03
"""The penalty of the fit that the head begins with, for tokens of variance 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growing:
    """A network whose newest expert, or the changes of its only one, learn beside a head on the
    last block of the first expert and on the newest expert's slice."""

    network: Network
    head: nn.Linear
    frozen: Lineage | None = None
    """The older experts; None: the only expert changes."""

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """Compute the logits of the answered classes. Earlier blocks of the first expert are left
        out: the classifier that is fitted afterwards reads them."""
        narrow = self.network.spec.narrow_width
        if self.frozen is None:
            (token_BC,) = self.network.token_slices(images_BCHW)
            read_BC = token_BC[:, :narrow]
        else:
            context = self.frozen.frozen_context(images_BCHW)
            older_BC, own_BC = self.network.token_slices(images_BCHW, context)
            read_BC = torch.cat((older_BC[:, :narrow], own_BC), dim=-1)
        logits_BC: Tensor = self.head(read_BC)
        return logits_BC

    @property
    def device(self) -> torch.device:
        return self.network.device

    def learnable(self) -> list[nn.Parameter]:
        return [*changes_of(self.network.newest), *self.head.parameters()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.network.named_parameters()
        yield from self.head.named_parameters(prefix="head")

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self.network.named_buffers()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SmoothedLoss:
    """Cross-entropy with label smoothing over the answered classes, which all weigh the same."""

    rows: Tensor
    """The row of each label in the head; labels without images have none."""
    weights_C: Tensor

    @classmethod
    def of(
        cls, images: LabelledImages, *, answered: Sequence[int], device: torch.device
    ) -> SmoothedLoss:
        rows = torch.zeros(len(images.classes), dtype=torch.int64)
        rows[list(answered)] = torch.arange(len(answered))
        counts = np.bincount(images.labels_N, minlength=len(images.classes))
        images_C = torch.from_numpy(counts[list(answered)]).float()
        return cls(rows=rows.to(device), weights_C=(images_C.mean() / images_C).to(device))

    def __call__(self, learner: Growing, images_BCHW: Tensor, labels_B: Tensor) -> Step:
        logits_BC, rows_B = learner(images_BCHW), self.rows[labels_B]
        loss = F.cross_entropy(logits_BC, rows_B, weight=self.weights_C, label_smoothing=SMOOTHING)
        return Step(loss=loss, right=(logits_BC.detach().argmax(dim=-1) == rows_B).sum())


def growing_plan(effort: Effort, *, images: int, adapts: bool, width: int) -> Plan:
    passes = growing_passes(images, kind="adapter" if adapts else "dense")
    return Plan(
        epochs=effort.epochs or max(1, round(passes / min(images, LONGEST_EPOCH))),
        batch_size=effort.batch_size or BATCH,
        learning_rate=effort.learning_rate or (RATE if adapts else rate_of(width)),
    )


def answered_with_images(images: LabelledImages, *, retired: Collection[str]) -> list[int]:
    """List the logits that are answered and have images."""
    return [
        place
        for place, name in enumerate(images.classes)
        if name not in retired and len(images.rows_of(name))
    ]


def growing_epoch(images: LabelledImages) -> DrawEpoch:
    """Draw all images in any order or, of many, some."""

    def draw(order: np.random.Generator) -> NDArray[np.int64]:
        return order.permutation(len(images))[:LONGEST_EPOCH]

    return draw


def changes_named(name: str, *, flip: bool | None, image_size: int) -> Changes:
    """Resolve a name of the command line. Nothing is mirrored unless it is asked for: every weight
    may learn here, and would learn that a sign and its mirror image are the same."""
    if name == "auto":
        return GentleChanges(flip=flip is True)
    return Augmentation.named(name, flip=flip, image_size=image_size)


def _fitted_head(
    student: Student,
    images: LabelledImages,
    answered: Sequence[int],
    *,
    folder: Path | None,
    ranks: Ranks,
) -> nn.Linear:
    """Fit a head to the tokens of the parent's last block. The first rank does it for all."""
    width = student.network.spec.narrow_width
    head = nn.Linear(width, len(answered))
    fitted = b""
    if ranks.rank == 0:
        cache = parent_cache_of(student, folder=folder)
        assert cache is not None, "an adaptation has a parent"
        fitted = _fit(cache.embeddings(images)[:, :width], images.labels_N, answered).tobytes()
    rows_CW = np.frombuffer(bytearray(ranks.from_first(fitted)), dtype=np.float32)
    weight_CW = torch.from_numpy(rows_CW.reshape(len(answered), width + 1))
    with torch.no_grad():
        head.weight.copy_(weight_CW[:, :width])
        head.bias.copy_(weight_CW[:, width])
    return head.to(student.network.device)


def _fit(tokens_NW: Floats, labels_N: NDArray[np.int64], answered: Sequence[int]) -> Floats:
    """Fit weights, with the bias in the last column."""
    known_N = np.isin(labels_N, answered)
    problem = Problem(
        tokens_NW=torch.from_numpy(tokens_NW[known_N]).double(),
        labels_N=torch.from_numpy(np.searchsorted(answered, labels_N[known_N])),
        count=len(answered),
        loss=cross_entropy,
    )
    with one_thread() if problem.is_small else nullcontext():
        weight_CW, bias_C = solve(problem, l2_penalty=HEAD_L2_PENALTY * variance_of(problem))
    return torch.cat((weight_CW, bias_C[:, None]), dim=1).float().numpy()


def grow(
    student: Student,
    *,
    data: TaskData,
    plan: Plan,
    request: Learning,
    progress: Progress,
    checkpoint: Checkpoint | None,
    ranks: Ranks,
    choose_threads: ChooseThreads | None,
) -> None:
    """Teach the newest expert from all images at hand. In an adaptation it is the first one, and
    learns changes, which are merged into its weights."""
    images, expert = data.for_training, student.network.newest
    adapts = student.aim == "adaptation"
    answered = answered_with_images(images, retired=data.retired)
    if adapts:
        head = _fitted_head(student, images, answered, folder=request.tokens, ranks=ranks)
        change_layers(expert, seed=request.seed)
    else:
        head = _new_head(student.network, classes=len(answered))
    growing = Growing(network=student.network, head=head, frozen=student.frozen_lineage())
    fit(
        growing,
        images,
        parameters=growing.learnable(),
        objective=SmoothedLoss.of(images, answered=answered, device=growing.device),
        plan=plan,
        make_optimiser=adamw(
            slow=list(head.parameters()) if adapts else (), slow_share=HEAD_RATE_SHARE
        ),
        augment=changes_named(
            request.augment, flip=request.flip, image_size=student.preprocessing.image_size
        ),
        preprocessing=student.preprocessing,
        draw_epoch=growing_epoch(images),
        seed=request.seed,
        name=ADAPTING if adapts else LEARNING,
        progress=progress,
        checkpoint=checkpoint,
        ranks=ranks,
        choose_threads=choose_threads,
        longest_gradient=LONGEST_GRADIENT,
        # An adaptation begins with a fitted head, and an expert with a guess.
        most_loss=math.log(len(answered)) * (1.0 if adapts else GREW),
    )
    if adapts:
        merge_layers(expert)


def _new_head(network: Network, *, classes: int) -> nn.Linear:
    """Make a head that knows nothing yet."""
    own = network.spec.slice_width(len(network.spec.experts) - 1)
    head = nn.Linear(network.spec.narrow_width + own, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head.to(network.device)
