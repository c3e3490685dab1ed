"""Fit a classifier by logistic regression with an L2 penalty.

The problem is convex, so there are no epochs and no learning rate, and the start does not matter.
Every class weighs the same, whatever its number of images. N tokens, W channels, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.fitting.problem import Linear, Problem

IMPORTS_THE_COMPILER = (
    "add_param_group", "zero_grad", "state_dict", "load_state_dict",
    "_cuda_graph_capture_health_check",
)  # fmt: skip
"""Methods of torch's optimisers whose wrappers import torch's compiler when they are first called.
That takes two seconds: longer than a short task learns."""


def skip_the_compiler() -> None:
    """Leave out the wrappers that import the compiler: they look for a mark first."""
    for name in IMPORTS_THE_COMPILER:
        method = getattr(getattr(torch.optim.Optimizer, name, None), "__wrapped__", None)
        if method is not None:
            method.__dict__.setdefault("__dynamo_disable", method)


ITERATIONS = 100
TOLERANCE = 1e-6
"""The largest gradient at which the solver stops."""


def solve(
    problem: Problem,
    *,
    l2_penalty: float,
    near: Linear | None = None,
    tolerance: float = TOLERANCE,
    iterations: int = ITERATIONS,
) -> Linear:
    """Fit the labels, with an L2 penalty on the weights.

    A solution that is `near` saves time, and changes nothing else.
    """
    mean_W = problem.tokens_NW.mean(dim=0)
    centred_NW = problem.tokens_NW - mean_W  # converges faster; the bias takes up the mean
    images_C = problem.images_C
    share_N = (images_C[problem.labels_N] * (images_C > 0).sum()).to(mean_W.dtype).reciprocal()
    weight_CW = torch.zeros(problem.count, len(mean_W), dtype=mean_W.dtype)
    bias_C = torch.zeros(problem.count, dtype=mean_W.dtype)
    if near is not None:
        weight_CW, bias_C = near[0].clone(), near[1] + near[0] @ mean_W
    weight_CW.requires_grad_(True)
    bias_C.requires_grad_(True)
    skip_the_compiler()
    optimiser = torch.optim.LBFGS(
        [weight_CW, bias_C],
        max_iter=iterations,
        tolerance_grad=tolerance,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimiser.zero_grad()
        logits_NC = centred_NW @ weight_CW.T + bias_C
        fit = problem.loss(logits_NC, problem.labels_N, weights_B=share_N)
        total = fit + 0.5 * l2_penalty * weight_CW.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimiser.step(objective)  # type: ignore[no-untyped-call]
    weight, bias = weight_CW.detach(), bias_C.detach()
    return weight, bias - weight @ mean_W
