"""Timing things in turns, so that whatever the machine does happens to all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def in_turns(works: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Seconds of processor time of each, as medians, after one round that does not count."""
    took: dict[str, list[float]] = {name: [] for name in works}
    with torch.inference_mode():
        for number in range(rounds + 1):
            for name, work in works.items():
                began_s = time.thread_time()
                work()
                if number:
                    took[name].append(time.thread_time() - began_s)
    return {name: statistics.median(seconds) for name, seconds in took.items()}
