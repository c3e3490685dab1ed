"""Run torch's optimisers without torch's compiler, whose import takes two seconds.

Wrappers around some methods of an optimiser import the compiler when they are first called. A short
task would wait longer for that than for its learning.
"""

from __future__ import annotations

from inspect import unwrap

import torch

WRAPPED = (
    "add_param_group", "zero_grad", "state_dict", "load_state_dict",
    "_cuda_graph_capture_health_check",
)  # fmt: skip


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with the same bits, in one kernel a group."""

    def __init__(self, groups: list[dict[str, object]], *, lr: float) -> None:
        skip_the_compiler()
        super().__init__(groups, lr=lr, fused=True)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Change the parameters by their gradients."""
        unwrap(torch.optim.AdamW.step)(self)


def skip_the_compiler() -> None:
    """Leave out the wrappers that import the compiler: they look for a mark first."""
    for name in WRAPPED:
        method = getattr(getattr(torch.optim.Optimizer, name, None), "__wrapped__", None)
        if method is not None:
            method.__dict__.setdefault("__dynamo_disable", method)
