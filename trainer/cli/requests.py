"""Make the requests of the trainer of the options that were given."""

from __future__ import annotations

import argparse
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TypeVar, get_type_hints

from model_store.cli.command import current_actor, read_keys
from model_store.errors import WrongUsage
from model_store.store.cache import default_checkpoint_folder, tokens_folder
from trainer.data.sources.place import refuse_missing
from trainer.evaluation.training_run import command_of
from trainer.ranks.place import place_of
from trainer.request import PretrainedFile

Asked = TypeVar("Asked")

INBOX = Path("/inbox")
"""Stands for the data of `--from-inbox` where a run is named by its data."""
DATA = ("data", "val_data", "unknown_data")


def read_options(asked: type[Asked], given: argparse.Namespace, **others: object) -> Asked:
    """Make the dataclass of the options that were given; `others` has values for single fields."""
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
    return read_options(PretrainedFile, options) if given else None


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
