"""Choose the threads of torch: few for work that is too small, or a machine that is too busy.

Between two operations of torch all threads wait for the slowest. Beside other programs a thread
may lose its core for milliseconds, hundreds of times in a step, so that two threads can take ten
times as long as one. Nothing but a timed step tells.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from model_store.tables import counted

FEWEST_IMAGES = 2000
"""Images to learn from, epochs included, below which timing costs more than it saves."""
_TIMED_STEPS = 3
_WORTH_A_CHANGE = 0.8
"""The share of the usual number's time below which another number of threads is taken."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread inside the block: others cost more than they give to small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def choose_threads(
    images: int, attempt: Callable[[], None], *, note: Callable[[str], None]
) -> None:
    """Keep torch's number of threads, unless fewer are clearly faster at `attempt`, a step."""
    usual = torch.get_num_threads()
    if images < FEWEST_IMAGES or usual == 1:
        return
    numbers = [usual]  # and its half, and so on down to 1
    while numbers[-1] > 1:
        numbers.append(numbers[-1] // 2)
    took_s = _time_each(numbers, attempt)
    fastest = min(took_s, key=lambda threads: took_s[threads])
    if took_s[fastest] > _WORTH_A_CHANGE * took_s[usual]:
        fastest = usual
    torch.set_num_threads(fastest)
    if fastest != usual:
        note(
            f"learning with {counted(fastest, 'thread')}: a step takes "
            f"{1000 * took_s[fastest]:.0f} ms, and {1000 * took_s[usual]:.0f} ms with {usual} "
            "threads, which other programs hold up"
        )


def _time_each(numbers: list[int], attempt: Callable[[], None]) -> dict[int, float]:
    """Time steps with each number of threads in turns. The first turn warms up."""
    took_s: dict[int, list[float]] = {threads: [] for threads in numbers}
    for turn in range(1 + _TIMED_STEPS):
        for threads in numbers:
            torch.set_num_threads(threads)
            began_s = time.perf_counter()
            attempt()
            if turn:
                took_s[threads].append(time.perf_counter() - began_s)
    return {threads: statistics.median(times) for threads, times in took_s.items()}
