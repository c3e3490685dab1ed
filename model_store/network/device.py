"""Choose the device of torch, for all commands alike."""

from __future__ import annotations

import torch

from model_store.errors import WrongUsage

DEVICES = ("auto", "cpu", "cuda")


def choose_device(name: str) -> torch.device:
    """Take a GPU for `auto` if there is one. Refuse a named device that is absent."""
    if name not in DEVICES:
        raise WrongUsage(f"device {name!r} is not one of {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise WrongUsage("device cuda was asked for, and torch sees no GPU here")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # Otherwise torch may sum parts of a 16-bit product in 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return torch.device("cuda")
