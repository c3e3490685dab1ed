"""Keep torch's compiler unloaded where an optimiser of torch is used without it."""

from __future__ import annotations

import torch

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
