"""Describe groups above the classes, and answer with a group where the class is in doubt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from model_store.errors import SpecInvalid
from model_store.names import check_name
from model_store.records.sealing import Record

_LEAST_SCORE = 0.65
"""The probability from which on a class, or a group, is not in doubt."""
MAX_LEVELS = 20


class Hierarchy(Record):
    """The parent of each name that has one: of classes, and of groups that have groups above."""

    parents: Annotated[dict[str, str], Field(min_length=1, max_length=200_000)]
    least_score: Annotated[float, Field(gt=0.5, le=1)] = _LEAST_SCORE
    """More than a half, so that two groups side by side cannot both reach it."""

    @model_validator(mode="after")
    def _ends(self) -> Self:
        for name in {*self.parents, *self.parents.values()}:
            try:
                check_name(name, what="the name")
            except SpecInvalid as error:
                raise ValueError(str(error)) from error
        for name in self.parents:
            self.above(name)
        return self

    def above(self, name: str) -> tuple[str, ...]:
        """List the groups of a class or group, the nearest first. Raise ValueError for a cycle."""
        groups: list[str] = []
        while (parent := self.parents.get(name)) is not None:
            if parent in groups or len(groups) == MAX_LEVELS:
                raise ValueError(
                    f"the parents of {name!r} form a cycle, or have more than {MAX_LEVELS} levels"
                )
            groups.append(parent)
            name = parent
        return tuple(groups)

    def check_names(self, classes: Sequence[str]) -> None:
        """Raise ValueError unless every name is a class, or a group of classes."""
        groups = {group for name in classes for group in self.above(name)}
        for name in self.parents:
            if name not in groups and name not in classes:
                raise ValueError(f"{name!r} is neither a class nor a group of classes")
        for name in classes:
            if name in groups:
                raise ValueError(f"{name!r} is a class, and cannot be a group")

    def renamed(self, old: str, new: str) -> Hierarchy:
        """Call a class by another name."""
        parents = {new if name == old else name: parent for name, parent in self.parents.items()}
        return self.model_copy(update={"parents": parents})


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    levels: Mapping[int, int]
    """The steps up from each class of the group, by the place of the class."""


@dataclass(frozen=True, slots=True)
class Higher:
    """An answer above the classes."""

    name: str
    score: float
    level: int
    """The steps up from the likeliest class of the group."""


class Levels:
    """The groups of a version's classes, the smallest first."""

    def __init__(self, hierarchy: Hierarchy, labels: Sequence[str]) -> None:
        self.least = hierarchy.least_score
        groups: dict[str, dict[int, int]] = {}
        for place, label in enumerate(labels):
            for level, group in enumerate(hierarchy.above(label), start=1):
                groups.setdefault(group, {})[place] = level
        by_size = sorted(groups.items(), key=lambda item: len(item[1]))
        self._groups = tuple(_Group(name, levels) for name, levels in by_size)

    def higher(self, scores: Sequence[float]) -> Higher | None:
        """Return the smallest group that is not in doubt, where the likeliest class is; else None.

        `scores` are the probabilities of the labels.
        """
        if max(scores) >= self.least:
            return None
        for group in self._groups:
            score = sum(scores[place] for place in group.levels)
            if score >= self.least:
                likeliest = max(group.levels, key=lambda place: scores[place])
                return Higher(group.name, float(score), group.levels[likeliest])
        return None
