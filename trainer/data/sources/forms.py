"""Recognise the form of the data that a user gives, and list its classes.

Forms: a folder a class, folders `train` and `val`, a zip or tar, CSV or JSONL, a folder with
metadata, JSON exports of annotation tools, parquet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from model_store.errors import WrongUsage
from trainer.data.folders import Listing, list_classes, list_loose
from trainer.data.hierarchy import FOLDERS, list_nested
from trainer.data.sources.archives import Member, open_tar, open_zip
from trainer.data.sources.parquet import list_parquet
from trainer.data.sources.place import (
    ARCHIVES,
    CSV,
    FILES,
    JSON,
    JSONL,
    PARQUET,
    TARS,
    ZIPS,
    Place,
    entries,
    folders_in,
    folders_of_images,
    images_in,
    is_stray,
    refuse_missing,
    shown,
)
from trainer.data.sources.rows import TEST, TRAIN, VAL, WHOLE, Parts, part_named
from trainer.data.sources.tables import IMAGE_FOLDERS, has_labels, list_export, list_table
from trainer.request import AddTask, Learning

Found = TypeVar("Found")


def _split_folders(folder: Place) -> dict[str, Place]:
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
        _refuse_two(parts, name, one, folder)
        parts[name] = one
    return parts if TRAIN in parts else {}


def _refuse_two(parts: Mapping[str, Found], name: str, new: Place, folder: Place) -> None:
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
            f"`data={shown(source)}` has no part to learn from: it has {', '.join(parts)}, and "
            "needs train"
        )
    by = None if judged else next((name for name in (VAL, TEST) if name in parts), None)
    note = f"{shown(source)} is split: learning from train" + (f", judging by {by}" if by else "")
    left = [name for name in parts if name not in (TRAIN, by)]
    if left:
        note += f"; {' and '.join(left)} left for `dne-train evaluate`"
    chosen = parts[TRAIN]
    return replace(chosen, judge=parts[by] if by else None, notes=(note, *chosen.notes))


def _to_judge(parts: Parts, *, setting: str, source: Place) -> Listing:
    """Choose the part to judge by: test, or val if there is no test."""
    if WHOLE in parts:
        return parts[WHOLE]
    by = next((name for name in (TEST, VAL) if name in parts), None)
    if by is None:
        raise WrongUsage(
            f"`{setting}={shown(source)}` has a part to learn from only: to judge by it all the "
            "same, give its train part"
        )
    note = f"{shown(source)} is split: judging by {by}"
    return replace(parts[by], notes=(note, *parts[by].notes))


def _is_part(folder: Place) -> bool:
    from_table = any(
        entry.suffix.lower() in (*CSV, *JSONL, *JSON, *PARQUET) for entry in folder.iterdir()
    )
    return from_table or (bool(folders_in(folder)) and not images_in(folder)[0])


_METADATA = ("metadata.csv", "metadata.jsonl")
_EXPORTS = ("labels.json", "_annotations.coco.json", "annotations.json")
_ANNOTATIONS = "annotations"
_ListFolders = Callable[[Place], Listing]


def list_data(request: AddTask) -> Listing:
    """List the classes to learn, and those to judge by: validation data, or a part of the data."""
    judge = list_judge(request)
    listing = _listed(
        request.data,
        nested=request.hierarchy == FOLDERS,
        with_groups=request.groups == FOLDERS,
        judged=judge is not None,
    )
    return listing if judge is None else replace(listing, judge=judge)


def list_judge(request: Learning) -> Listing | None:
    """List the validation data, if there is any."""
    if request.val_data is None:
        return None
    return list_judged(request.val_data, setting="val_data")


def _listed(path: Path, *, nested: bool, with_groups: bool, judged: bool) -> Listing:
    """List the classes to learn. `nested`: folders in folders are groups of classes.
    `with_groups`: folders in class folders hold images that belong together."""
    source = _opened(path, "data")

    def folders(place: Place) -> Listing:
        if not nested:
            return list_classes(place, with_groups=with_groups)
        listing, parents = list_nested(place)
        return replace(listing, parents=parents)

    listing = to_learn(_parts(source, folders, "data"), source=source, judged=judged)
    if nested and not listing.folder.is_dir():
        raise WrongUsage(
            f"`hierarchy=folders` takes groups from folders, and {shown(listing.folder)} is a "
            "table: give a file of groups, `hierarchy=FILE`"
        )
    return listing


def list_judged(path: Path, *, setting: str) -> Listing:
    """List the classes to judge by: the part of split data that is not for learning."""
    source = _opened(path, setting)
    parts = _parts(source, lambda place: list_classes(place, setting=setting), setting)
    return _to_judge(parts, setting=setting, source=source)


def list_strangers(path: Path, *, setting: str) -> Listing:
    """List all images, whatever classes they are said to have."""
    source = _opened(path, setting)
    parts = _parts(source, lambda place: list_loose(place, setting=setting), setting)
    return _to_judge(parts, setting=setting, source=source)


def _opened(path: Path, setting: str) -> Place:
    """Open an archive as a folder; leave other places as they are."""
    refuse_missing(path, setting=setting)
    if path.is_dir():
        return path
    name = path.name.lower()
    if not path.is_file() or not name.endswith(FILES):
        raise WrongUsage(
            f"`{setting}={shown(path)}` is not a folder, and no file that can hold data: "
            f"{', '.join(FILES)}"
        )
    if name.endswith(ZIPS):
        return _without_wrapper(open_zip(path))
    return _without_wrapper(open_tar(path)) if name.endswith(TARS) else path


def _without_wrapper(root: Member) -> Place:
    """Go into a folder that holds all the rest, as archives of a folder have it."""
    place: Place = root
    while True:
        inside = [entry for entry in entries(place) if not is_stray(entry)]
        if len(inside) != 1 or not inside[0].is_dir() or part_named(inside[0].name):
            return place
        [only] = inside
        if not _table_in(only) and (images_in(only)[0] or not folders_in(only)):
            return place
        place = only


def _parts(source: Place, list_folders: _ListFolders, setting: str) -> Parts:
    if not source.is_dir():
        return _of_table(source)
    found = _table_in(source)
    if found is not None:
        return found()
    parts: Parts = {}
    for name, folder in _split_folders(source).items():
        inner = _table_in(folder)
        parts[name] = _unsplit(inner(), folder) if inner else list_folders(folder)
    if parts:
        return parts
    _refuse_archive_inside(source, setting)
    return {WHOLE: list_folders(source)}


def _of_table(table: Place) -> Parts:
    ending = table.suffix.lower()
    if ending in JSON:
        in_annotations = table.parent.name == _ANNOTATIONS
        return list_export(table, root=table.parent.parent if in_annotations else None)
    if ending in PARQUET:
        return list_parquet([table], source=table)
    return list_table(table)


def _table_in(folder: Place) -> Callable[[], Parts] | None:
    """Find the table that labels the images of a folder."""
    for name in _METADATA:
        table = folder.joinpath(name)
        if table.is_file() and has_labels(table):
            return lambda: list_table(table)
    by_tool = _export_in(folder)
    if by_tool is not None:
        return by_tool
    files = _parquet_in(folder)
    if files:
        return lambda: list_parquet(files, source=folder)
    lone = [entry for entry in entries(folder) if entry.suffix.lower() in (*CSV, *JSONL)]
    # On a disk the table itself can be given; inside an archive it cannot.
    if isinstance(folder, Member) and len(lone) == 1 and has_labels(lone[0]):
        return lambda: list_table(lone[0])
    return None


def _export_in(folder: Place) -> Callable[[], Parts] | None:
    names = {one.name for one in folders_in(folder)}
    if not names <= {*IMAGE_FOLDERS, _ANNOTATIONS}:
        return None
    if names & set(IMAGE_FOLDERS) and _ANNOTATIONS in names:
        tables = [entry for entry in entries(folder.joinpath(_ANNOTATIONS)) if entry.suffix in JSON]
        return (lambda: _annotated(tables, folder)) if tables else None
    table = next((one for name in _EXPORTS if (one := folder.joinpath(name)).is_file()), None)
    return (lambda: list_export(table)) if table else None


def _annotated(tables: list[Place], folder: Place) -> Parts:
    """List COCO's and Datumaro's `annotations`: one file a part, or one file in all."""
    if len(tables) == 1:
        return list_export(tables[0], root=folder, subset=_subset(tables[0]))
    parts: Parts = {}
    for table in tables:
        name = part_named(_subset(table).rstrip("0123456789"))
        if name is None:
            raise WrongUsage(
                f"{shown(table)} is one of several, and not named for train, val or test: give "
                "the one file that is meant"
            )
        _refuse_two(parts, name, table, folder)
        inner = list_export(table, root=folder, subset=_subset(table))
        parts[name] = _unsplit(inner, table)
    return parts


def _subset(table: Place) -> str:
    return table.name.removesuffix(table.suffix).rpartition("_")[2]


def _unsplit(parts: Parts, source: Place) -> Listing:
    if WHOLE not in parts:
        raise WrongUsage(f"{shown(source)} is a part, and is split into parts once more")
    return parts[WHOLE]


def _parquet_in(folder: Place) -> list[Place]:
    """List parquet files, unless they lie beside class folders."""
    if folders_of_images(folders_in(folder)):
        return []
    for place in (folder, folder.joinpath("data")):
        files = entries(place) if place.is_dir() else []
        found = [file for file in files if file.suffix.lower() in PARQUET and not is_stray(file)]
        if found:
            return found
    return []


def _refuse_archive_inside(source: Place, setting: str) -> None:
    """Name the archives in a folder that holds nothing else."""
    inside = [entry for entry in entries(source) if not is_stray(entry)]
    archives = [entry for entry in inside if entry.name.lower().endswith(ARCHIVES)]
    if archives and not any(entry.is_dir() for entry in inside):
        what = "holds another archive" if isinstance(source, Member) else "holds an archive"
        raise WrongUsage(
            f"`{setting}={shown(source)}` {what}, {shown(archives[0].name)}: "
            f"{'unpack it, and give that one' if isinstance(source, Member) else 'give that one'}"
        )
