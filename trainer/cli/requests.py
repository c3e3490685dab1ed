"""Turn the given options into requests of the trainer, and prepare the run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from model_store.cli.command import current_actor, read_keys
from model_store.errors import WrongUsage
from model_store.host.machine import usable_cores
from model_store.store.cache import default_checkpoint_folder, tokens_folder
from model_store.tables import counted
from trainer.backbones.known import backbone_named
from trainer.data.sources.place import refuse_missing
from trainer.ranks.launch import RankPlace, place_of
from trainer.request import AddTask, Deepen, Evaluate, PretrainedFile, Report, Work, command_of

Asked = TypeVar("Asked")

INBOX = Path("/inbox")
"""Stands for the data of `--from-inbox` where a run is named by its data."""
DATA = ("data", "val_data", "unknown_data")


def read_options(asked: type[Asked], given: argparse.Namespace, **others: object) -> Asked:
    """Build the dataclass from the given options; `others` has values for single fields."""
    hints, values = get_type_hints(asked), dict(others)
    for field in fields(asked):  # type: ignore[arg-type]
        kind = hints[field.name]
        if field.name in values:
            continue
        if is_dataclass(kind):
            values[field.name] = read_options(kind, given)  # type: ignore[arg-type]
        elif hasattr(given, field.name):
            values[field.name] = getattr(given, field.name)
    return asked(**values)


def learning_request(
    asked: type[Asked], options: argparse.Namespace, *, of: Path, **others: object
) -> Asked:
    """Make a request to learn a version. `of` names the run where no checkpoint folder is given."""
    return read_options(
        asked,
        options,
        actor=current_actor(),
        keys=read_keys(options),
        checkpoint=checkpoint_folder(options, of=of),
        tokens=tokens_folder(options.store),
        command=command_of(options.arguments),
        measures_threads=options.threads is None and place_of() is None,
        **others,
    )


def pretrained_file(options: argparse.Namespace) -> PretrainedFile | None:
    given = [field.name for field in fields(PretrainedFile) if hasattr(options, field.name)]
    if given and not hasattr(options, "file"):
        raise WrongUsage(f"`{given[0]}` is about a pre-trained file; give one with `pretrained`")
    if not given:
        return None
    backbone_named(str(options.file))  # a wrong name is refused before torch is imported
    return read_options(PretrainedFile, options)


def refuse_missing_data(options: argparse.Namespace) -> None:
    """Refuse paths that lead nowhere before torch is imported, which takes seconds."""
    for name in DATA:
        path = getattr(options, name, None)
        if path is not None:
            refuse_missing(path, setting=name)


def checkpoint_folder(options: argparse.Namespace, *, of: Path) -> Path:
    if not hasattr(options, "checkpoint"):
        return default_checkpoint_folder(store=options.store, data=of)
    chosen: Path = options.checkpoint
    if chosen.exists() and not chosen.is_dir():
        raise WrongUsage(f"--checkpoint {chosen} is not a folder")
    store = Path(options.store).resolve()
    if "://" not in options.store and chosen.resolve().is_relative_to(store):
        raise WrongUsage(f"--checkpoint {chosen} is inside the store; choose a folder outside it")
    return chosen


if TYPE_CHECKING:
    from trainer.progress import Progress
    from trainer.ranks.ranks import Ranks

_MAX_THREADS = 1024
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


def _how_shared(place: RankPlace) -> str:
    import torch

    threads, cores = torch.get_num_threads(), usable_cores()
    said = f"learning in {place.ranks} processes, {counted(threads, 'thread')} each"
    if place.local_ranks * threads > cores:
        said += f"; this machine has {counted(cores, 'core')}, so they wait for each other"
    return said


def prepare_torch(options: argparse.Namespace) -> None:
    import torch

    place = place_of()
    if place is not None and options.threads is None:
        torch.set_num_threads(max(1, usable_cores() // place.local_ranks))
    if options.threads is not None:
        if not 1 <= options.threads <= _MAX_THREADS:
            raise WrongUsage(
                f"--threads must be between 1 and {_MAX_THREADS}, not {options.threads}"
            )
        torch.set_num_threads(options.threads)
    # Acts as use_deterministic_algorithms(True, warn_only=True), which would also import torch's
    # compiler: two seconds of processor time for every command.
    torch.set_deterministic_debug_mode("warn")


SETTING = re.compile(r"`([a-z]+(?:_[a-z]+)*)(?:=([^`]*))?`")


def _names(kind: Any) -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        yield name
        for part in (hint, *get_args(hint)):
            if is_dataclass(part) and isinstance(part, type):
                yield from (field.name for field in fields(part))


SETTINGS = frozenset(
    name for kind in (AddTask, Deepen, Work, Evaluate, Report) for name in _names(kind)
) | {"from_inbox", "on", "processes", "project", "ray_address", "ray_upload", "token", "url"}


def with_options(sentence: str) -> str:
    """Return the sentence with options in the place of settings."""
    return SETTING.sub(_option, sentence)


def _option(setting: re.Match[str]) -> str:
    name, value = setting.groups()
    if name not in SETTINGS:
        return setting[0]
    option = name.replace("_", "-")
    if value is None or value == "True":
        return f"--{option}"
    return f"--no-{option}" if value == "False" else f"--{option} {value}"
