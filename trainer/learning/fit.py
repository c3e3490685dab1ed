"""Learn in batches: augmentation, AdamW, a learning rate that warms up and decays."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from model_store.errors import DneError
from model_store.preprocess import Normalisation
from model_store.records.manifest import Preprocessing
from trainer.data.augment import Changes
from trainer.data.folders import LabelledImages
from trainer.data.sampling import DrawEpoch
from trainer.fitting.logistic import skip_the_compiler
from trainer.learning.checkpoint import Checkpoint, RunState
from trainer.learning.losses import AnyLearner, BatchLoss, Learner, Step
from trainer.learning.plan import Plan
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, BatchPart, LossAndRight, Ranks, part_of

SIGNS = ("not enough memory", "can't allocate memory", "out of memory")


@contextmanager
def explained(*, batch_size: int, attempt: Callable[[int], object]) -> Iterator[None]:
    """Turn exhausted memory into a sentence. `attempt` tries a step and changes no weight."""
    try:
        yield
        return
    except (RuntimeError, MemoryError) as error:
        if not is_exhaustion(error):
            raise
    # Outside the handler, whose traceback holds the memory of the failed step.
    fitting = _largest_that_fits(batch_size, attempt)
    advice = f"`batch_size={fitting}` fits" if fitting else "not even one image at a time fits"
    raise DneError(f"memory ran out in batches of {batch_size}: nothing was published; {advice}")


def is_exhaustion(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    )


def _largest_that_fits(batch_size: int, attempt: Callable[[int], object]) -> int:
    """Try half, a quarter …; return 0 when none fits."""
    size = batch_size // 2
    while size:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if _fits(size, attempt):
            return size
        size //= 2
    return 0


def _fits(size: int, attempt: Callable[[int], object]) -> bool:
    try:
        attempt(size)
    except (RuntimeError, MemoryError) as error:
        if not is_exhaustion(error):
            raise
        return False
    return True


GREW = 1.25
"""Times the least mean loss of an epoch so far: an epoch with a larger one has done harm."""
MOST_HALVINGS = 4
"""The times that a rate is halved before a loss that grows is taken as it is."""
WARM_UP_SHARE = 0.1
FINAL_RATE_SHARE = 0.01
WEIGHT_DECAY = 0.05
SLOW_RATE_SHARE = 0.1
"""The share of the learning rate for weights of a pre-trained expert, which are good already."""

OptimiserFactory = Callable[[Learner, Sequence[nn.Parameter], float], torch.optim.Optimizer]
"""Make the optimiser of parameters at a learning rate. Its groups may have a `rate_share`."""

ChooseThreads = Callable[[int, Callable[[], None]], None]
"""Choose the number of threads for so many images, by timing steps that change nothing."""

Schedule = Callable[[int], Callable[[int], float]]
"""Give the share of the learning rate in each of so many steps."""


def fit(
    network: AnyLearner,
    images: LabelledImages,
    *,
    parameters: Sequence[nn.Parameter],
    objective: BatchLoss[AnyLearner],
    plan: Plan,
    augment: Changes,
    preprocessing: Preprocessing,
    draw_epoch: DrawEpoch,
    seed: int,
    name: str,
    progress: Progress,
    checkpoint: Checkpoint | None = None,
    make_optimiser: OptimiserFactory | None = None,
    schedule: Schedule | None = None,
    ranks: Ranks = ALONE,
    choose_threads: ChooseThreads | None = None,
    longest_gradient: float | None = None,
    most_loss: float | None = None,
) -> None:
    """Change `parameters`, and nothing else, so that `network` answers the labels of `images`.

    Go on from `checkpoint`, to the same bits as without an interruption. Each of the `ranks` takes
    a part of every batch. `longest_gradient`: a longer one is shortened to it. `most_loss`: an
    epoch whose mean loss is larger, unless the run began so, or clearly larger than that of an
    earlier epoch, is learnt again from where it began, at half the rate; None: the rate stays.
    """
    order, changes = np.random.default_rng(seed), Generator().manual_seed(seed)
    epochs = [list(_batches(draw_epoch(order), plan.batch_size)) for _ in range(plan.epochs)]
    optimiser = (make_optimiser or adamw())(network, parameters, plan.learning_rate)
    state = RunState(network=network, parameters=parameters, optimiser=optimiser, changes=changes)
    if checkpoint is not None and checkpoint.is_past(name):
        return
    done = checkpoint.restore(name, state) if checkpoint is not None else 0
    if done >= plan.epochs:
        return
    normalisation = normalisation_on(network.device, preprocessing)
    take_step = _Stepper(
        state=state,
        loss_of=partial(objective, network),
        images=images,
        prepare=lambda pixels, part: normalisation.standardise(
            augment(normalisation.scale(pixels.permute(0, 3, 1, 2).float()), changes, part)
        ),
        ranks=ranks,
        rate=plan.learning_rate,
        schedule=schedule or rate_share,
        steps=sum(map(len, epochs)),
        taken=sum(map(len, epochs[:done])),
        longest_gradient=longest_gradient,
    )
    images_left = sum(len(rows) for batches in epochs[done:] for rows in batches)
    if choose_threads is not None:
        choose_threads(images_left, partial(take_step.attempt, plan.batch_size))
    taken = sum(map(len, epochs[:done]))
    with progress.phase(name, total=images_left) as phase:
        epoch = done
        while epoch < plan.epochs:
            good = state.copied() if most_loss is not None else {}
            losses: list[float] = []
            try:
                for rows in epochs[epoch]:
                    with (
                        explained(batch_size=len(rows), attempt=take_step.attempt),
                        ranks.watched(),
                    ):
                        loss, accuracy = take_step(rows)
                    losses.append(loss)
                    phase.advance(len(rows), loss=loss, accuracy=accuracy)
                mean = sum(losses) / len(losses)
            except LossLost:
                if not good or state.halvings >= MOST_HALVINGS:
                    raise
                mean = math.inf
            begun = losses[0] if losses else 0.0
            most = _largest_mean(most_loss or math.inf, begun=begun, least=state.least_loss)
            if good and mean > most and state.halvings < MOST_HALVINGS:
                phase.advance(-sum(map(len, epochs[epoch][: len(losses)])))
                state.go_back(good)
                take_step.go_back(taken, halvings=state.halvings)
                progress.note(
                    f"the loss grew to {mean:.3f} in epoch {epoch + 1} of {plan.epochs}: the epoch "
                    f"is learnt again at a learning rate of "
                    f"{plan.learning_rate / 2**state.halvings:.2g}"
                )
                continue
            state.course[1] = min(state.least_loss, mean)
            taken += len(epochs[epoch])
            epoch += 1
            if checkpoint is not None:
                checkpoint.save(name, epoch, state, last=epoch == plan.epochs)


def _largest_mean(most_loss: float, *, begun: float, least: float) -> float:
    """Return the largest mean loss of an epoch that has done no harm. A run whose loss is clearly
    above `most_loss` before its first step (`begun`) is only held to what it had."""
    if math.isinf(least):
        return GREW * begun if begun > GREW * most_loss else most_loss
    return GREW * least if least > most_loss else min(most_loss, GREW * least)


class LossLost(DneError):
    """The loss is no number any more."""


class _Stepper:
    """Take one step after the other: forward, backward, and the learning rate of the step."""

    def __init__(
        self,
        *,
        state: RunState,
        loss_of: Callable[[Tensor, Tensor], Step],
        images: LabelledImages,
        prepare: Callable[[Tensor, BatchPart], Tensor],
        rate: float,
        schedule: Schedule,
        steps: int,
        taken: int,
        ranks: Ranks,
        longest_gradient: float | None = None,
    ) -> None:
        self._state, self._loss_of, self._prepare = state, loss_of, prepare
        self._ranks, self._spread = ranks, ranks.spread(self._loss_and_right, state.parameters)
        self._device = state.network.device
        self._pixels = torch.from_numpy(images.pixels_NHWC).to(self._device)
        self._labels = torch.from_numpy(images.labels_N).to(self._device)
        self._rate, self._share = rate, schedule(steps)
        self._steps, self._taken = steps, taken
        self._longest_gradient = longest_gradient
        self._halvings = state.halvings

    def __call__(self, rows: NDArray[np.int64]) -> tuple[float, float]:
        """Take a step on these images. Return their loss and accuracy before the step."""
        optimiser = self._state.optimiser
        for group in optimiser.param_groups:
            group["lr"] = (
                group.get("rate_share", 1.0) * self._rate * self._share(self._taken)
            ) / 2**self._halvings
        self._taken += 1
        part = part_of(self._ranks, len(rows))
        mean, right = self._spread(*self._batch(rows, part))
        mean = part.weight * mean
        loss, answered = self._ranks.total(
            mean.item() / part.ranks, right.item() if part.images else 0
        )
        if not math.isfinite(loss):
            raise LossLost(
                f"the loss became {loss} in step {self._taken} of {self._steps}: nothing was "
                "published; try a lower `learning_rate`"
            )
        optimiser.zero_grad(set_to_none=True)
        mean.backward()  # type: ignore[no-untyped-call]
        if self._longest_gradient is not None:
            nn.utils.clip_grad_norm_(self._state.parameters, self._longest_gradient)
        optimiser.step()
        return loss, answered / len(rows)

    def go_back(self, taken: int, *, halvings: int) -> None:
        """Take the steps after so many again, at a rate that was halved so often in all."""
        self._taken, self._halvings = taken, halvings

    def attempt(self, size: int) -> None:
        """Compute as in a step on `size` images, and change neither weights nor later draws."""
        drawn = self._state.changes.get_state()
        self._state.optimiser.zero_grad(set_to_none=True)
        batch = self._batch(np.zeros(size, dtype=np.int64), part_of(self._ranks, size))
        mean, _ = self._loss_and_right(*batch)
        mean.backward()  # type: ignore[no-untyped-call]
        self._state.changes.set_state(drawn)

    def _batch(self, rows: NDArray[np.int64], part: BatchPart) -> tuple[Tensor, Tensor]:
        """Return this rank's part of a batch: changed images and their labels."""
        chosen = torch.from_numpy(rows[part.rows]).to(self._device)
        return self._prepare(self._pixels[chosen], part), self._labels[chosen]

    def _loss_and_right(self, images_BCHW: Tensor, labels_B: Tensor) -> LossAndRight:
        step = self._loss_of(images_BCHW, labels_B)
        return step.loss, step.right


def normalisation_on(device: torch.device, preprocessing: Preprocessing) -> Normalisation[Tensor]:
    """Build the normalisation of images [B, 3, S, S] on a device."""
    return Normalisation.of(
        preprocessing, lambda values: torch.tensor(values, device=device)[:, None, None]
    )


def _batches(rows: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    """Cut the rows into batches of almost equal size: no last batch of one or two images."""
    yield from np.array_split(rows, math.ceil(len(rows) / size))


def adamw(
    *,
    weight_decay: float = WEIGHT_DECAY,
    slow: Collection[nn.Parameter] = (),
    slow_share: float = SLOW_RATE_SHARE,
) -> OptimiserFactory:
    """Make AdamW. Parameters in `slow` change at `slow_share` of the rate."""

    def make(
        network: Learner, parameters: Sequence[nn.Parameter], rate: float
    ) -> torch.optim.Optimizer:
        groups = parameter_groups(
            network, parameters, weight_decay=weight_decay, slow=slow, slow_share=slow_share
        )
        return AdamW(groups, lr=rate)

    return make


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with the same bits, in one kernel a group."""

    def __init__(self, groups: list[dict[str, object]], *, lr: float) -> None:
        skip_the_compiler()
        super().__init__(groups, lr=lr, fused=True)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Change the parameters by their gradients."""
        unwrap(torch.optim.AdamW.step)(self)


MUON_RATE_SHARE = 10.0
"""The rate of matrices under Muon, as a share of the rate of the other parameters."""
_MOMENTUM = 0.95
_ORTHOGONALISING = (3.4445, -4.7750, 2.0315)
"""The quintic polynomial that brings all singular values near 1, and ..."""
_ORTHOGONALISING_STEPS = 5
"""... how often it is applied."""
_QKV = "attention.qkv.weight"
_BY_MUON = (_QKV, "attention.out.weight", "widen.weight", "narrow.weight", ".value")
"""Endings of the names of matrices between two layers of features."""
_CONVOLUTIONS = (".stem.", ".patch_embed.")


def muon(*, slow: Collection[nn.Parameter] = ()) -> OptimiserFactory:
    """Make Muon for the matrices inside of experts, and AdamW for all other parameters (ADR 127).
    Parameters in `slow` are left to AdamW, at SLOW_RATE_SHARE of the rate."""

    def make(
        network: Learner, parameters: Sequence[nn.Parameter], rate: float
    ) -> torch.optim.Optimizer:
        spared = {id(one) for one in slow}
        parts = {
            id(one): 3 if name.endswith(_QKV) else 1
            for name, one in network.named_parameters()
            if id(one) not in spared and _is_for_muon(name, one)
        }
        matrices: dict[int, list[nn.Parameter]] = {}
        for one in parameters:
            matrices.setdefault(parts.get(id(one), 0), []).append(one)
        others = parameter_groups(network, matrices.pop(0, []), slow=slow)
        turned = [
            {"params": members, "weight_decay": 0.0, "rate_share": MUON_RATE_SHARE, "parts": count}
            for count, members in sorted(matrices.items())
        ]
        return Muon([*others, *turned], lr=rate)

    return make


def _is_for_muon(name: str, parameter: nn.Parameter) -> bool:
    if parameter.ndim == 4:
        return any(part in name for part in _CONVOLUTIONS)
    return parameter.ndim >= 2 and name.endswith(_BY_MUON)


class Muon(AdamW):
    """Steps along the orthogonalised momentum of matrices, in groups with `parts`; AdamW elsewhere.

    A matrix is cut into so many `parts` of equal rows: queries, keys and values are three. See
    Jordan et al. (2024). torch's own takes single matrices only, one after the other in bfloat16.
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Change the parameters by their gradients."""
        groups = self.param_groups
        self.param_groups = [one for one in groups if "parts" not in one]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if "parts" in group:
                self._step_matrices(group["params"], parts=group["parts"], rate=group["lr"])

    def _step_matrices(
        self, parameters: Sequence[nn.Parameter], *, parts: int, rate: float
    ) -> None:
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for one in parameters:
            if one.grad is None:
                continue
            state = self.state[one]
            if not state:  # AdamW looks for a step in every state that it loads
                state |= {"step": torch.zeros(()), "momentum": torch.zeros_like(one)}
            momentum = state["momentum"]
            momentum.lerp_(one.grad, 1 - _MOMENTUM)
            update = one.grad.lerp(momentum, _MOMENTUM)
            for pair in zip(_matrices(one, parts), _matrices(update, parts), strict=True):
                by_shape.setdefault(pair[0].shape, []).append(pair)
        for (rows, columns), pairs in by_shape.items():
            turned = orthogonalised(torch.stack([update for _, update in pairs]))
            scale = math.sqrt(max(1.0, rows / columns))
            for (matrix, _), update in zip(pairs, turned, strict=True):
                matrix.add_(update, alpha=-rate * scale)


def _matrices(parameter: Tensor, parts: int) -> tuple[Tensor, ...]:
    """View a parameter as matrices: convolutions by what they write, others by their last side."""
    matrix = parameter.flatten(1) if parameter.ndim == 4 else parameter.flatten(0, -2)
    return tuple(matrix.chunk(parts))


def orthogonalised(matrices_NRC: Tensor) -> Tensor:
    """Bring all singular values of each matrix near 1, by Newton-Schulz steps."""
    a, b, c = _ORTHOGONALISING
    tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x: Tensor = matrices_NRC.mT if tall else matrices_NRC
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    for _ in range(_ORTHOGONALISING_STEPS):
        squared = x @ x.mT
        x = a * x + (b * squared + c * squared @ squared) @ x
    return x.mT if tall else x


def parameter_groups(
    network: Learner,
    parameters: Sequence[nn.Parameter],
    *,
    weight_decay: float = WEIGHT_DECAY,
    slow: Collection[nn.Parameter] = (),
    slow_share: float = SLOW_RATE_SHARE,
) -> list[dict[str, Any]]:
    """Give weight decay to matrices only: not to biases, norms, scales, tokens and positions."""
    spared = {
        id(one) for name, one in network.named_parameters() if name.endswith(("position", "_bias"))
    }
    slowed = {id(one) for one in slow}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for one in parameters:
        decay = weight_decay if one.ndim >= 2 and id(one) not in spared else 0.0
        share = slow_share if id(one) in slowed else 1.0
        groups.setdefault((decay, share), []).append(one)
    return [
        {"params": members, "weight_decay": decay, "rate_share": share}
        for (decay, share), members in sorted(groups.items(), key=itemgetter(0), reverse=True)
    ]


def rate_share(steps: int) -> Callable[[int], float]:
    """Warm up linearly, then follow a cosine down to a small share of the learning rate."""
    warm_up = max(1, round(steps * WARM_UP_SHARE))

    def share(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, steps - warm_up)
        return FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * done))

    return share
