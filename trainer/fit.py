"""Learning: batches, augmentation, AdamW with warm-up and cosine decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from model_store.errors import DneError
from model_store.manifest import Preprocessing
from model_store.network import Network
from trainer.augment import Augmentation
from trainer.data import LabelledImages
from trainer.losses import Objective
from trainer.progress import Progress

WARM_UP_SHARE = 0.1
FINAL_RATE_SHARE = 0.01
WEIGHT_DECAY = 0.05

# The rows of the training images that an epoch visits, in this order.
DrawEpoch = Callable[[np.random.Generator], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how fast."""

    epochs: int
    batch_size: int
    learning_rate: float


def fit(
    network: Network,
    images: LabelledImages,
    *,
    parameters: Sequence[nn.Parameter],
    objective: Objective,
    plan: Plan,
    augment: Augmentation,
    preprocessing: Preprocessing,
    draw_epoch: DrawEpoch,
    seed: int,
    name: str,
    progress: Progress,
) -> None:
    """Changes `parameters`, and nothing else, so that `network` answers the labels of `images`."""
    pixels = torch.from_numpy(images.pixels_NHWC).to(network.device)
    labels = torch.from_numpy(images.labels_N).to(network.device)
    order, changes = np.random.default_rng(seed), Generator().manual_seed(seed)
    epochs = [draw_epoch(order) for _ in range(plan.epochs)]
    batches = [batch for rows in epochs for batch in _batches(rows, plan.batch_size)]
    optimiser = torch.optim.AdamW(
        parameter_groups(network, parameters), lr=plan.learning_rate, fused=True
    )
    rate = torch.optim.lr_scheduler.LambdaLR(optimiser, rate_share(len(batches)))
    with progress.phase(name, total=sum(map(len, batches))) as phase:
        for number, rows in enumerate(batches, start=1):
            chosen = torch.from_numpy(rows).to(network.device)
            clean = pixels[chosen].permute(0, 3, 1, 2).float() / 255
            step = objective(
                network, standardise(augment(clean, changes), preprocessing), labels[chosen]
            )
            loss = step.loss.item()
            if not math.isfinite(loss):
                raise DneError(
                    f"the loss became {loss} in step {number} of {len(batches)}: nothing was "
                    "published; try a lower --learning-rate"
                )
            optimiser.zero_grad(set_to_none=True)
            step.loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            rate.step()
            phase.advance(len(rows), loss=loss, accuracy=step.right.item() / len(rows))


def standardise(images_BCHW: Tensor, preprocessing: Preprocessing) -> Tensor:
    mean, std = (
        torch.tensor(values, device=images_BCHW.device)[:, None, None]
        for values in (preprocessing.mean, preprocessing.std)
    )
    return (images_BCHW - mean) / std


def every_image(images: LabelledImages) -> DrawEpoch:
    """An epoch is every image once, shuffled."""

    def draw(order: np.random.Generator) -> NDArray[np.int64]:
        return order.permutation(len(images))

    return draw


def _batches(rows: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    """Batches of equal size as far as possible: no last batch of one or two."""
    yield from np.array_split(rows, math.ceil(len(rows) / size))


def parameter_groups(network: Network, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Weight decay is for matrices: biases, norms, scales, tokens and positions have none."""
    spared = {
        id(one) for name, one in network.named_parameters() if name.endswith(("position", "_bias"))
    }
    matrices = [one for one in parameters if one.ndim >= 2 and id(one) not in spared]
    others = [one for one in parameters if one.ndim < 2 or id(one) in spared]
    return [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]


def rate_share(steps: int) -> Callable[[int], float]:
    """Linear warm-up, then a cosine down to a small share of the learning rate."""
    warm_up = max(1, round(steps * WARM_UP_SHARE))

    def share(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, steps - warm_up)
        return FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * done))

    return share
