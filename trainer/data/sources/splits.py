"""Know the parts of data that is split: train to learn from, val and test to judge by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from model_store.errors import WrongUsage
from trainer.data.folders import Listing
from trainer.data.sources.place import (
    CSV,
    JSON,
    JSONL,
    PARQUET,
    Place,
    folders_in,
    images_in,
    shown,
)
from trainer.data.sources.rows import TEST, TRAIN, VAL, WHOLE, Parts, part_named

Found = TypeVar("Found")


def split_folders(folder: Place) -> dict[str, Place]:
    """Find train and val folders; return none where a folder has classes or something else.

    A class may be named `train`: it has images in it, and a part has folders or a table.
    """
    if images_in(folder)[0]:
        return {}
    parts: dict[str, Place] = {}
    for one in folders_in(folder):
        name = part_named(one.name)
        if name is None or not _is_part(one):
            return {}
        refuse_two(parts, name, one, folder)
        parts[name] = one
    return parts if TRAIN in parts else {}


def refuse_two(parts: Mapping[str, Found], name: str, new: Place, folder: Place) -> None:
    if name in parts:
        raise WrongUsage(
            f"{shown(folder)} has two parts for {name}, and one is {shown(new.name)}: name the "
            "parts train, val and test"
        )


def to_learn(parts: Parts, *, source: Place, judged: bool = False) -> Listing:
    """Choose the part to learn from, and the part to judge by: val, or test if there is no val.

    Where the data is `judged` by other images, its own part is left out.
    """
    if WHOLE in parts:
        return parts[WHOLE]
    if TRAIN not in parts:
        raise WrongUsage(
            f"--data {shown(source)} has no part to learn from: it has {', '.join(parts)}, and "
            "needs train"
        )
    by = None if judged else next((name for name in (VAL, TEST) if name in parts), None)
    note = f"{shown(source)} is split: learning from train" + (f", judging by {by}" if by else "")
    left = [name for name in parts if name not in (TRAIN, by)]
    if left:
        note += f"; {' and '.join(left)} left for `dne-train evaluate`"
    chosen = parts[TRAIN]
    return replace(chosen, judge=parts[by] if by else None, notes=(note, *chosen.notes))


def to_judge(parts: Parts, *, option: str, source: Place) -> Listing:
    """Choose the part to judge by: test, or val if there is no test."""
    if WHOLE in parts:
        return parts[WHOLE]
    by = next((name for name in (TEST, VAL) if name in parts), None)
    if by is None:
        raise WrongUsage(
            f"{option} {shown(source)} has a part to learn from only: to judge by it all the same, "
            "give its train part"
        )
    note = f"{shown(source)} is split: judging by {by}"
    return replace(parts[by], notes=(note, *parts[by].notes))


def _is_part(folder: Place) -> bool:
    from_table = any(
        one.suffix.lower() in (*CSV, *JSONL, *JSON, *PARQUET) for one in folder.iterdir()
    )
    return from_table or (bool(folders_in(folder)) and not images_in(folder)[0])
