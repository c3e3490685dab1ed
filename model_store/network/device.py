"""The one place where a device is chosen."""

from __future__ import annotations

import torch

from model_store.errors import WrongUsage

DEVICES = ("auto", "cpu", "cuda")


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU when there is one. A device that is asked for and absent is an error."""
    if name not in DEVICES:
        raise WrongUsage(f"device {name!r} is not one of {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise WrongUsage("device cuda was asked for, and torch sees no GPU here")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # Else torch may add up parts of a 16-bit product in 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return torch.device("cuda")
