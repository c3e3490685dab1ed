"""Explain exhausted memory, and find by trying which batch size would fit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from model_store.errors import DneError

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
    advice = f"--batch-size {fitting} fits" if fitting else "not even one image at a time fits"
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
