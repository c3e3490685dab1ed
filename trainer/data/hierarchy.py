"""Read groups above the classes: from a file of parents, or from folders in folders."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from pydantic import ValidationError

from model_store.errors import DataRejected, WrongUsage
from model_store.names import new_class_name, spelt_among
from model_store.records.hierarchy import MAX_LEVELS, Hierarchy
from model_store.records.sealing import first_reason
from model_store.tables import size
from trainer.data.folders import ClassFolder, Listing, list_classes
from trainer.data.sources import limits
from trainer.data.sources.place import Place, shown

MAX_SHOWN = 60
TEXT = "tag:yaml.org,2002:str"
FOLDERS = "folders"
"""The value of `hierarchy` that takes the groups from the folders."""

_Parents = dict[str, str]


def read_parents(path: Path) -> _Parents:
    """Read a YAML or JSON file of `class: group` and `group: group` lines."""
    try:
        if path.stat().st_size > limits.MAX_GROUPS_BYTES:
            raise DataRejected(
                f"`hierarchy={shown(path)}` is larger than {size(limits.MAX_GROUPS_BYTES)}"
            )
        found = dict(_pairs(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise WrongUsage(f"`hierarchy={shown(path)}` cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataRejected(f"`hierarchy={shown(path)}` is not YAML: {why}") from error
    except ValueError as error:
        raise DataRejected(f"`hierarchy={shown(path)}`: {error}") from error
    if not found:
        raise DataRejected(f"`hierarchy={shown(path)}` has no lines such as `puma: cat`")
    return {_nfc(name): _nfc(parent) for name, parent in found.items()}


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a YAML file. Raise ValueError for a line that is not two names.

    Only events are read, and no value is made of them: an alias, a merge key, a date or a number
    takes no memory and no time.
    """
    loader = yaml.SafeLoader(text)
    try:
        while not isinstance(loader.get_event(), yaml.DocumentStartEvent):
            if loader.check_event(yaml.StreamEndEvent):
                return
        if not isinstance(loader.get_event(), yaml.MappingStartEvent):
            return
        while not loader.check_event(yaml.MappingEndEvent):
            first, second = loader.get_event(), loader.get_event()
            name, parent = _name(loader, event=first), _name(loader, event=second)
            if name is None or parent is None:
                said = first.value[:MAX_SHOWN] if isinstance(first, yaml.ScalarEvent) else None
                which = "a line" if said is None else f"the line of {said!r}"
                raise ValueError(
                    f"{which} is not a name and the name of its group; put names that look like "
                    "numbers or words of YAML in quotes"
                )
            yield name, parent
    finally:
        loader.dispose()


def _name(loader: yaml.SafeLoader, *, event: yaml.Event) -> str | None:
    if not isinstance(event, yaml.ScalarEvent):
        return None
    tag = event.tag or loader.resolve(yaml.ScalarNode, event.value, event.implicit)
    return str(event.value) if tag == TEXT else None


def list_nested(folder: Place, *, level: int = 0) -> tuple[Listing, _Parents]:
    """List class folders at any depth. The folders above a class are its groups."""
    here = list_classes(folder)
    inner = [entry for entry in here.ignored if entry.is_dir() and entry.parent != folder]
    groups = {entry.parent for entry in inner if not entry.name.startswith(".")}
    names = {new_class_name(group.name): group for group in groups}
    if names and level == MAX_LEVELS:
        raise DataRejected(f"{shown(folder)} is more than {MAX_LEVELS} folders deep")
    classes: list[ClassFolder] = []
    ignored = [entry for entry in here.ignored if entry.parent not in groups]
    parents: _Parents = {}
    for class_folder in here.classes:
        if class_folder.name not in names:
            classes.append(class_folder)
            continue
        group = names[class_folder.name]
        if class_folder.files:
            raise DataRejected(f"{shown(group)} has images and folders: it is a class or a group")
        listing, above = list_nested(group, level=level + 1)
        classes += listing.classes
        ignored += listing.ignored
        new = {
            name: class_folder.name
            for name in (*listing.names, *above.values())
            if name not in above
        }
        _refuse_two_groups(parents, {**above, **new})
        parents |= {**above, **new}
    _refuse_twice([class_folder.name for class_folder in classes])
    return replace(here, classes=tuple(classes), ignored=tuple(ignored)), parents


def merged(
    before: Hierarchy | None, parents: Mapping[str, str], *, classes: Sequence[str]
) -> Hierarchy | None:
    """Add these parents to those of the parent version; the newer one of two counts."""
    if before is None and not parents:
        return None
    given = {spelt_among(name, classes) or name: group for name, group in parents.items()}
    try:
        found = Hierarchy(parents={**(before.parents if before else {}), **given})
        found.check_names(classes)
    except ValidationError as error:
        raise DataRejected(f"`hierarchy`: {first_reason(error)}") from error
    except ValueError as error:
        raise DataRejected(f"`hierarchy`: {error}") from error
    return found


def _refuse_two_groups(known: _Parents, others: _Parents) -> None:
    for name, parent in others.items():
        if known.get(name, parent) != parent:
            raise DataRejected(
                f"the folder {name!r} is in {known[name]!r} and in {parent!r}; give groups and "
                "classes names of their own"
            )


def _refuse_twice(names: Sequence[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise DataRejected(
            f"two folders are named {twice[0]!r}; put the images of a class into one folder"
        )


def _nfc(name: str) -> str:
    return unicodedata.normalize("NFC", name)
