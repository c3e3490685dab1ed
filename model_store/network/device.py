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
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
