"""Plan which cells a comparison needs, and in which order they run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from lab.cell import Cell
from lab.presets import changed, preset_named
from lab.registry import read_choice
from lab.report.metrics import Course, courses_of
from lab.results import Line
from model_store.errors import WrongUsage

FIVE, THREE, TWO, ONE = (tuple(range(count)) for count in (5, 3, 2, 1))
SYSTEMS = "systems"
State = Literal["done", "unfinished", "missing", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One row of a table, and the seeds that it needs."""

    choice: str
    title: str
    seeds: tuple[int, ...] = TWO
    section: str = SYSTEMS
    """`systems`, or the title of an ablation."""
    setting: str = ""
    turn: int = 0
    """The row's first seed runs together with seed `turn` of rows of turn 0, its next one later."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Name the row as results do."""
        method, _, variant = self.choice.partition(":")
        return (method, variant, self.setting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One cell of the plan."""

    planned: Planned
    seed: int
    state: State
    minutes: float | None
    """Minutes that are left, as finished cells of the same method took; None: not known."""
    problem: str = ""
    """The reason of the state `unknown`."""

    def cell(self, preset: str) -> Cell:
        return Cell(
            choice=read_choice(self.planned.choice),
            preset_name=preset,
            setting=self.planned.setting,
            preset=changed(preset_named(preset), self.planned.setting),
            seed=self.seed,
        )


def _ablation(section: str, rows: Mapping[str, str], *, turn: int = 2) -> list[Planned]:
    return [
        Planned(choice=choice, title=title, section=section, turn=turn)
        for choice, title in rows.items()
    ]


def _protocol(section: str, settings: Sequence[str]) -> list[Planned]:
    return [
        Planned(
            choice=choice, title=f"{title}, {setting}", section=section, setting=setting, turn=2
        )
        for setting in settings
        for choice, title in (("dne", "DNE k = 1"), ("der", "DER"))
    ]


def _systems(rows: Mapping[str, str], *, seeds: tuple[int, ...], turn: int = 0) -> list[Planned]:
    return [
        Planned(choice=choice, title=title, seeds=seeds, turn=turn)
        for choice, title in rows.items()
    ]


CONVERGED: tuple[Planned, ...] = (
    *_systems({"joint": "Joint"}, seeds=THREE),
    *_systems(
        {
            "dne:k=4": "DNE k = 4",
            "dne:k=4,network=independent": "IA k = 4",
            "dne": "DNE k = 1",
            "dne:network=independent": "IA k = 1",
        },
        seeds=FIVE,
    ),
    *_systems({"replay": "replay"}, seeds=THREE),
    *_systems(
        {"lda:rule=ridge": "random ridge", "lda": "LDA", "der": "DER"},
        seeds=FIVE,
    ),
    *_systems(
        {
            "joint:backbone=resnet": "Joint, ResNet",
            "dytox:loss=cross-entropy": "DyTox, cross-entr.",
            "foster": "FOSTER",
            "podnet": "PODNet",
            "icarl": "iCaRL",
            "ncm": "nearest mean",
            "dytox": "DyTox",
            "icarl:backbone=transformer": "iCaRL, transf.",
            "replay:backbone=resnet": "replay, ResNet",
        },
        seeds=THREE,
        turn=1,
    ),
    *_ablation(
        "Heads",
        {
            "dne:k=2": "DNE k = 2",
            "dne:k=7": "DNE k = 7",
            "dne:k=12,network=independent": "IA k = 12",
        },
        turn=1,
    ),
    *_ablation(
        "Matrices of task attention",
        {
            "dne:network=dense-s": "no attention, shared values",
            "dne:network=dense-f": "no attention, values by head",
            "dne:network=sss": "sss: all shared",
            "dne:network=ffs": "ffs: values shared",
            "dne:network=fff": "fff: none shared",
        },
    ),
    *_ablation(
        "Spatial-task attention",
        {
            "dne:attention=plain": "DNE k = 1, plain attention",
            "dne:network=sta-ia,attention=plain": "IA in one softmax",
            "dne:network=sta-spdh,attention=plain": "IA + SPDH",
            "dne:network=sta-dpdh,attention=plain": "IA + DPDH",
            "dne:network=sta-both,attention=plain": "IA + SPDH + DPDH",
        },
    ),
    *_ablation(
        "Cross-task attention by layer",
        {
            "dne:network=mhsa,attention=plain": "in MHSA",
            "dne:network=mhsa-mlp,attention=plain": "in MHSA and MLP",
            "dne:network=fc1": "in FC1",
            "dne:network=fc2": "in FC2",
        },
    ),
    *_ablation(
        "Cross-task attention by depth",
        {f"dne:network=depth-{count}": f"in the first {count} blocks" for count in (1, 2, 3)},
    ),
    *_protocol("Memory", ("memory=60", "memory=150", "memory=300")),
    *_protocol("Classes a step", ("step=1", "step=2", "step=10")),
)
"""The paper's rows. Its memories of 200 to 2,000 exemplars of 100 classes are 60 to 600 here."""

SIGNS: tuple[Planned, ...] = tuple(
    _systems(
        {
            "dne": "DNE k = 1",
            "dne:network=independent": "IA k = 1",
            "lda": "frozen, LDA",
            "lda:rule=ridge": "frozen, random ridge",
            "ncm": "frozen, nearest mean",
            "adapter": "adapter",
            "joint": "Joint",
            "replay": "all weights, task by task",
            "dne:k=4": "DNE k = 4",
            "dne:k=4,network=independent": "IA k = 4",
        },
        seeds=THREE,
    )
)

SHORT: tuple[Planned, ...] = (
    *_systems(
        {
            "dne": "DNE k = 1",
            "dne:network=independent": "IA k = 1",
            "replay": "replay",
            "der": "DER",
            "ncm": "nearest mean",
        },
        seeds=THREE,
    ),
    *_systems(
        {
            "dytox": "DyTox",
            "foster": "FOSTER",
            "icarl": "iCaRL",
            "podnet": "PODNet",
            "joint": "Joint",
            "lda": "LDA",
            "lda:rule=ridge": "random ridge",
        },
        seeds=TWO,
    ),
    *_systems({"joint:backbone=resnet": "Joint, ResNet"}, seeds=ONE),
    *_ablation(
        "Without balanced tuning",
        {
            "dne:tuning=none": "DNE k = 1, not tuned",
            "dne:network=independent,tuning=none": "IA k = 1, not tuned",
        },
    ),
    Planned(
        choice="dne:attention=plain",
        title="plain attention, 2 epochs of tuning",
        section="What the trial changed",
        setting="tuning_epochs=2",
        seeds=ONE,
    ),
)
"""The rows that networks were compared by before they had learnt; no more are planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One row is better than another, by at least so many points."""

    choice: str
    above: str
    least: float = 0.0


CLAIMS: Mapping[str, tuple[Claim, ...]] = {
    "converged": tuple(
        Claim(choice="dne:k=4", above=above)
        for above in (
            "dne:k=4,network=independent",
            "lda:rule=ridge",
            "lda",
            "replay",
            "dytox:loss=cross-entropy",
            "dne",
        )
    ),
    "signs": (
        Claim(choice="dne", above="dne:network=independent", least=8.0),
        Claim(choice="dne", above="lda"),
        Claim(choice="dne", above="lda:rule=ridge"),
        Claim(choice="dne", above="adapter"),
    ),
}

PLANS: Mapping[str, tuple[Planned, ...]] = {
    "converged": CONVERGED,
    "signs": SIGNS,
    "short": SHORT,
}


def plan_of(preset: str) -> tuple[Planned, ...]:
    """Return the rows of a preset; another one has those of `converged`."""
    return PLANS.get(preset, CONVERGED)


def steps(lines: Iterable[Line], *, preset: str, plan: Sequence[Planned]) -> list[Step]:
    """List the cells of the plan in the order of running, with their states."""
    courses = {course.last.cell: course for course in courses_of(lines)}
    cells = [(one, seed) for one in plan for seed in one.seeds]
    cells.sort(key=lambda cell: (cell[0].turn + cell[1], cell[0].turn))
    times = _Times(courses.values())
    return [_step(one, seed, courses=courses, times=times, preset=preset) for one, seed in cells]


def _step(
    planned: Planned,
    seed: int,
    *,
    courses: Mapping[tuple[str, str, str, str, int], Course],
    times: _Times,
    preset: str,
) -> Step:
    try:
        choice = read_choice(planned.choice)
    except WrongUsage as error:
        return Step(planned=planned, seed=seed, state="unknown", minutes=None, problem=str(error))
    known = courses.get((choice.name, choice.variant, preset, planned.setting, seed))
    begun = known.last.task + 1 if known is not None else 0
    learnt = times.first_is_learnt(choice.build(preset_named(preset)).base, seed)
    if known is not None and known.is_finished:
        return Step(planned=planned, seed=seed, state="done", minutes=0.0)
    minutes = times.left(planned, begun=max(begun, 1) if learnt else begun)
    state: State = "unfinished" if begun else "missing"
    return Step(planned=planned, seed=seed, state=state, minutes=minutes)


class _Times:
    """The minutes of each task of finished cells, and the first tasks that are learnt by then."""

    def __init__(self, courses: Iterable[Course]) -> None:
        self._minutes: dict[tuple[str, str, str], list[list[float]]] = {}
        self._learnt: set[tuple[str, int]] = set()
        for course in courses:
            line = course.last
            if course.is_finished:
                key = (line.method, line.variant, line.setting)
                tasks = [one.cpu_s / 60 for one in course.lines]
                self._minutes.setdefault(key, []).append(tasks)

    def first_is_learnt(self, base: str | None, seed: int) -> bool:
        """Return whether an earlier cell of the plan learns this first task."""
        if base is None:
            return False
        known = (base, seed) in self._learnt
        self._learnt.add((base, seed))
        return known

    def left(self, planned: Planned, *, begun: int) -> float | None:
        """Estimate the minutes of the tasks from `begun` on."""
        method, variant, setting = planned.key
        known = self._minutes.get(
            (method, variant, setting), self._minutes.get((method, variant, ""))
        )
        return fmean(sum(tasks[begun:]) for tasks in known) if known else None
