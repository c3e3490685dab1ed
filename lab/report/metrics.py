"""Compute the metrics of cells, and their mean and standard error over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from lab.presets import CIFAR_CLASSES, changed, preset_named
from lab.registry import METHODS, read_choice
from lab.results import Line

TRANSFORMER, RESNET, UNKNOWN = "transformer", "ResNet-18", "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A mean over seeds."""

    mean: float
    error: float | None
    """The standard error of the mean; None for one seed."""
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Average the values that there are. Return None where there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    error = stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return Spread(mean=fmean(known), error=error, count=len(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The lines of one cell in the order of its tasks. Some methods learn the last one only."""

    lines: tuple[Line, ...]
    sizes: tuple[int, ...]
    """The number of classes of each task."""

    @property
    def last(self) -> Line:
        return self.lines[-1]

    @property
    def seed(self) -> int:
        return self.last.seed

    @property
    def is_finished(self) -> bool:
        return self.last.task == len(self.sizes) - 1

    @property
    def is_whole(self) -> bool:
        """Return whether there is a line of every task."""
        return len(self.lines) == len(self.sizes)

    @property
    def average(self) -> float | None:
        return fmean(line.accuracy for line in self.lines) if self.is_whole else None

    @property
    def forgetting(self) -> float | None:
        """Average the best minus the last accuracy over the old tasks."""
        old = range(len(self.sizes) - 1)
        if not self.is_whole or not old:
            return None
        return fmean(
            max(line.accuracies[task] for line in self.lines[task:]) - self.last.accuracies[task]
            for task in old
        )

    def new(self, line: Line) -> float:
        return line.accuracies[-1]

    def old(self, line: Line) -> float | None:
        """Average over the classes of earlier tasks, which have equally many test images."""
        sizes = self.sizes[: line.task]
        if not sizes:
            return None
        right = sum(n * one for n, one in zip(sizes, line.accuracies, strict=False))
        return right / sum(sizes)

    @property
    def new_average(self) -> float | None:
        later = self.lines[1:]
        return fmean(map(self.new, later)) if self.is_whole and later else None

    @property
    def new_alone(self) -> float | None:
        """Average over the tasks after the first; None where a line does not tell."""
        later = [line.new_alone for line in self.lines[1:]]
        told = [one for one in later if one is not None]
        return fmean(told) if self.is_whole and told and len(told) == len(later) else None

    @property
    def old_average(self) -> float | None:
        known = [share for line in self.lines if (share := self.old(line)) is not None]
        return fmean(known) if self.is_whole and known else None

    @property
    def cpu_s(self) -> float:
        return sum(line.cpu_s for line in self.lines)

    @property
    def was_resumed(self) -> bool:
        return any(line.resumed for line in self.lines)


METRICS: Mapping[str, str] = {
    "last": "LA",
    "average": "AA",
    "new_last": "new",
    "old_last": "old",
    "new_average": "new, all tasks",
    "old_average": "old, all tasks",
    "new_alone": "new, alone",
    "forgetting": "forgetting",
}


def metric(course: Course, name: str) -> float | None:
    """Return a metric by its name in METRICS."""
    if name == "last":
        return course.last.accuracy
    if name == "new_last":
        return course.new(course.last)
    if name == "old_last":
        return course.old(course.last)
    value: float | None = getattr(course, name)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method with its options and settings: its finished cells by seed."""

    method: str
    variant: str
    setting: str
    backbone: str
    base: str | None
    courses: tuple[Course, ...]

    @property
    def choice(self) -> str:
        return f"{self.method}:{self.variant}" if self.variant else self.method

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.method, self.variant, self.setting)

    @property
    def last(self) -> Line:
        """Return a line of the last task: sizes and costs are the same for every seed."""
        return self.courses[0].last

    def spread(self, name: str) -> Spread | None:
        return spread(metric(course, name) for course in self.courses)

    @property
    def cpu_s(self) -> float:
        return fmean(course.cpu_s for course in self.courses)


def courses_of(lines: Iterable[Line]) -> list[Course]:
    """Collect the lines of each cell. Of two lines of one task the later one counts."""
    cells: dict[tuple[str, str, str, str, int], dict[int, Line]] = {}
    for line in lines:
        cells.setdefault(line.cell, {})[line.task] = line
    return [
        Course(
            lines=tuple(tasks[task] for task in sorted(tasks)),
            sizes=task_sizes(preset, setting),
        )
        for (_, _, preset, setting, _), tasks in cells.items()
    ]


@cache
def task_sizes(preset: str, setting: str) -> tuple[int, ...]:
    asked = changed(preset_named(preset), setting)
    later = ((asked.classes or CIFAR_CLASSES) - asked.first) // asked.step
    return (asked.first, *[asked.step] * later)


def rows_of(courses: Sequence[Course]) -> list[Row]:
    """Collect the finished cells of each method and setting, in the order of the registry."""
    found: dict[tuple[str, str, str], list[Course]] = {}
    for course in courses:
        if course.is_finished:
            line = course.last
            found.setdefault((line.method, line.variant, line.setting), []).append(course)
    rows = [
        Row(
            method=method,
            variant=variant,
            setting=setting,
            backbone=backbone_of(method, variant, some[0].last.preset),
            base=base_of(method, variant, some[0].last.preset),
            courses=tuple(sorted(some, key=lambda course: course.seed)),
        )
        for (method, variant, setting), some in found.items()
    ]
    order = {name: place for place, name in enumerate(METHODS)}
    return sorted(rows, key=lambda row: (order.get(row.method, len(order)), *row.key))


@cache
def base_of(method: str, variant: str, preset: str) -> str | None:
    """Name the first task that a method shares with others, as the method does."""
    if method not in METHODS:
        return None
    return read_choice(f"{method}:{variant}").build(preset_named(preset)).base


@cache
def backbone_of(method: str, variant: str, preset: str) -> str:
    """Name the backbone by the option `backbone`, or by the first task."""
    if method not in METHODS:
        return UNKNOWN
    options = read_choice(f"{method}:{variant}").options
    named = getattr(options, "backbone", None) or base_of(method, variant, preset) or TRANSFORMER
    return RESNET if str(named).startswith("resnet") else TRANSFORMER


def paired(row: Row, reference: Row, name: str) -> Spread | None:
    """Compare on the same seed and order of classes: the mean of the differences."""
    theirs = {(one.seed, one.last.order_digest): metric(one, name) for one in reference.courses}
    differences = []
    for course in row.courses:
        ours, other = metric(course, name), theirs.get((course.seed, course.last.order_digest))
        if ours is not None and other is not None:
            differences.append(ours - other)
    return spread(differences)


def difference(row: Row, reference: Row) -> Spread | None:
    """Compare last accuracies on the same orders. The error is the larger one of those over seeds
    and over test images."""
    found = paired(row, reference, "last")
    theirs = {(one.seed, one.last.order_digest): one.last for one in reference.courses}
    variances = []
    for course in row.courses:
        other = theirs.get((course.seed, course.last.order_digest))
        if other is not None and course.last.right and other.right:
            each_N = answers(course.last) - answers(other)
            variances.append(float(each_N.var()) / len(each_N))
    if found is None or len(variances) < found.count:
        return found
    error = math.sqrt(sum(variances)) / found.count
    return replace(found, error=max(error, found.error or 0.0))


def answers(line: Line) -> NDArray[np.float64]:
    """Return 1 for each test image so far that is answered right, and 0 for the others.

    The bits fill whole bytes: the last ones belong to no image, and are the same in all lines.
    """
    packed = np.frombuffer(bytes.fromhex(line.right or ""), dtype=np.uint8)
    return np.unpackbits(packed).astype(np.float64)


def to_joint(row: Row, rows: Iterable[Row]) -> float | None:
    """Subtract the last accuracy of joint on the same backbone, which knows no order of tasks."""
    joints = [
        one.spread("last")
        for one in rows
        if one.method == "joint" and one.backbone == row.backbone and not one.setting
    ]
    ours = row.spread("last")
    if not joints or joints[0] is None or ours is None:
        return None
    return ours.mean - joints[0].mean
