"""Prepare torch and the processes of a run, as the options ask."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from model_store.errors import WrongUsage
from model_store.tables import counted
from trainer.ranks.place import Place, cores_here, place_of

if TYPE_CHECKING:
    from trainer.progress import Progress
    from trainer.ranks.ranks import Ranks

MAX_THREADS = 1024
"""More threads than any machine has cores: torch fails on huge numbers of threads."""


@contextmanager
def joined_ranks(options: argparse.Namespace) -> Iterator[tuple[Ranks, Progress]]:
    """Join the other processes of the run, if there are any. The first one shows the progress."""
    from model_store.network.device import choose_device
    from trainer.progress import Silent, show_progress
    from trainer.ranks.ranks import ALONE, refuse_differences

    place = place_of()
    if place is None:
        yield ALONE, show_progress()
        return
    from trainer.ranks.group import taking_part

    with taking_part(place, on_gpu=choose_device(options.device).type == "cuda") as ranks:
        refuse_differences(ranks, _shared(options), what="options")
        progress = Silent() if ranks.rank else show_progress()
        progress.note(_how_shared(place))
        yield ranks, progress


def _shared(options: argparse.Namespace) -> dict[str, object]:
    """List the options that all ranks must have alike: machines may differ in paths and threads."""
    paths = {"arguments", "data", "val_data", "checkpoint", "file", "sign", "trust"}
    own = {"command", "json", "threads", *paths}
    return {name: value for name, value in sorted(vars(options).items()) if name not in own}


def _how_shared(place: Place) -> str:
    import torch

    threads, cores = torch.get_num_threads(), cores_here()
    said = f"learning in {place.ranks} processes, {counted(threads, 'thread')} each"
    if place.local_ranks * threads > cores:
        said += f"; this machine has {counted(cores, 'core')}, so they wait for each other"
    return said


def prepare_torch(options: argparse.Namespace) -> None:
    import torch

    place = place_of()
    if place is not None and options.threads is None:
        torch.set_num_threads(max(1, cores_here() // place.local_ranks))
    if options.threads is not None:
        if not 1 <= options.threads <= MAX_THREADS:
            raise WrongUsage(
                f"--threads must be between 1 and {MAX_THREADS}, not {options.threads}"
            )
        torch.set_num_threads(options.threads)
    # Acts as use_deterministic_algorithms(True, warn_only=True), which would also import torch's
    # compiler: two seconds of processor time for every command.
    torch.set_deterministic_debug_mode("warn")
