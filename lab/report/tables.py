"""Fill the tables of the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lab.plan import SYSTEMS, Claim, Planned
from lab.report.metrics import (
    METRICS,
    TRANSFORMER,
    Row,
    Spread,
    difference,
    paired,
    spread,
    to_joint,
)
from lab.report.published import published

REFERENCE = ("dne", "", "")
"""DNE k = 1, which all other rows are compared with."""
SIZES = ("heads", "depth", "patch_size", "resnet_width")
"""Settings that change the cost of a backbone, and nothing of the protocol."""
NEW_AND_OLD = ("new_average", "old_average", "new_alone")
NONE = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    """Columns of words; the others are numbers."""


Column = tuple[str, Callable[[Row], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """All finished rows, and the names that the plan gives them."""

    rows: Sequence[Row]
    plan: Sequence[Planned]

    def title(self, row: Row) -> str:
        """Name a row as the plan does; otherwise by its options."""
        named = {one.key: one.title for one in self.plan}
        plain = named.get((row.method, row.variant, ""), row.choice)
        setting = f", {row.setting}" if row.setting else ""
        return named.get(row.key, plain + setting)

    @property
    def reference(self) -> Row | None:
        return next((row for row in self.rows if row.key == REFERENCE), None)

    @property
    def systems(self) -> list[Row]:
        """List the rows of the two main tables: no ablations, and the protocol as it is."""
        others = {one.key for one in self.plan if one.section != SYSTEMS}
        planned = {one.key for one in self.plan if one.section == SYSTEMS}
        return [
            row
            for row in self.rows
            if row.key in planned
            or (row.key not in others and row.method != "dne" and changes_sizes_only(row.setting))
        ]

    def same_backbone(self) -> Table:
        chosen = [row for row in self.systems if row.backbone == TRANSFORMER and not row.setting]
        return self._table(chosen, [*self._accuracies, ("served", served)])

    def matched_cost(self) -> Table:
        """Sort by cost, with the cost in shares of the reference's."""
        chosen = sorted(self.systems, key=lambda row: row.last.flop)
        return self._table(
            chosen,
            [
                ("backbone", lambda row: row.backbone),
                ("F, GFLOP", cost),
                ("F / DNE k = 1", self._cost_share),
                *self._accuracies,
                ("parameters", parameters),
                ("passes", passes),
                ("CPU minutes", cpu_minutes),
                ("seeds", seeds),
                ("the paper's F / LA", self._published_cost),
            ],
            words=2,
            by_cost=True,
        )

    def differences(self, rows: Iterable[Row] | None = None) -> Table:
        """Compare with the reference on the same orders of classes."""
        names = ("last", "average", *NEW_AND_OLD)
        chosen = [row for row in (rows or self.systems) if row.key != REFERENCE]
        columns: list[Column] = [
            (METRICS[name], lambda row, name=name: self._difference(row, name))  # type: ignore[misc]
            for name in names
        ]
        shared: Column = ("first task", self._first_task)
        return self._table(chosen, [shared, *columns, ("pairs", self._pairs)], words=2)

    def claims(self, claims: Iterable[Claim]) -> Table:
        """Judge each claim by the differences of last accuracies."""
        shown = [self._claim(one) for one in claims]
        titles = ("claim", "asked", "difference", "pairs", "verdict")
        return Table(titles=titles, rows=tuple(shown))

    def _claim(self, claim: Claim) -> tuple[str, ...]:
        ours, other = (self._named(one) for one in (claim.choice, claim.above))
        named = {one.choice: one.title for one in self.plan if not one.setting}
        title = " above ".join(named.get(one, one) for one in (claim.choice, claim.above))
        asked = f"+{claim.least:.0f}" if claim.least else "> 2 errors"
        found = difference(ours, other) if ours and other else None
        if found is None:
            return (title, asked, NONE, "0", "not run")
        points, error = 100 * found.mean, 100 * (found.error or math.inf)
        verdict = "shown" if points > 2 * error and points >= claim.least else "**not shown**"
        return (title, asked, with_error(found, show=signed), str(found.count), verdict)

    def _named(self, choice: str) -> Row | None:
        return next((row for row in self.rows if row.choice == choice and not row.setting), None)

    def new_and_old(self) -> Table:
        names = ("new_average", "old_average", "new_alone", "forgetting")
        grown = [row for row in self.systems if row.key[0] != "joint"]  # it has no tasks
        return self._table(grown, [shown_metric(name) for name in names])

    def ablation(self, section: str) -> Table | None:
        """Show the rows of one ablation beside the reference; None where no cell is finished."""
        keys = {one.key for one in self.plan if one.section == section}
        return self._variants([row for row in self.rows if row.key in keys])

    def attention(self) -> Table | None:
        """Show who attends to whom after the last task; None where no row tells."""
        rows = [row for row in self.rows if row.last.attention]
        if not rows:
            return None
        names = tuple(rows[0].last.attention or ())
        columns = [attention_column(name, place) for place in range(2) for name in names]
        return self._table(rows, columns, sort=False)

    def unplanned(self) -> Table | None:
        """Show variants of DNE, and settings, that the plan does not name."""
        planned = {one.key for one in self.plan}
        shown = {row.key for row in self.systems}
        return self._variants(
            [row for row in self.rows if row.key not in planned and row.key not in shown]
        )

    def _variants(self, rows: Sequence[Row]) -> Table | None:
        if not rows:
            return None
        reference = [self.reference] if self.reference else []
        beside = [one for one in self.rows if any(without_setting(row) == one.key for row in rows)]
        chosen = [*reference, *beside, *rows]
        columns = [shown_metric(name) for name in ("last", "average", *NEW_AND_OLD)]
        more: list[Column] = [
            ("LA to DNE k = 1", lambda row: self._difference(row, "last")),
            ("F, GFLOP", cost),
            ("parameters", parameters),
            ("seeds", seeds),
            ("the paper's LA", self._published),
        ]
        unique = list({row.key: row for row in chosen}.values())
        return self._table(unique, columns + more, sort=False)

    @property
    def _accuracies(self) -> list[Column]:
        return [shown_metric("last"), shown_metric("average"), ("D", self._to_joint)]

    def _table(
        self,
        rows: Sequence[Row],
        columns: Sequence[Column],
        *,
        words: int = 1,
        by_cost: bool = False,
        sort: bool = True,
    ) -> Table:
        """Write the rows, the best last accuracy first unless they are sorted already."""
        ordered = sorted(rows, key=_last, reverse=True) if sort and not by_cost else rows
        return Table(
            titles=("method", *(title for title, _ in columns)),
            rows=tuple((self.title(row), *(show(row) for _, show in columns)) for row in ordered),
            words=words,
        )

    def _to_joint(self, row: Row) -> str:
        return signed(to_joint(row, self.rows)) if row.method != "joint" else NONE

    def _difference(self, row: Row, name: str) -> str:
        if self.reference is None or row.key == REFERENCE:
            return NONE
        return with_error(paired(row, self.reference, name), show=signed)

    def _pairs(self, row: Row) -> str:
        found = paired(row, self.reference, "last") if self.reference else None
        return str(found.count) if found else "0"

    def _first_task(self, row: Row) -> str:
        shared = self.reference is not None and row.base == self.reference.base is not None
        return "the same" if shared else "its own"

    def _cost_share(self, row: Row) -> str:
        return f"{row.last.flop / self.reference.last.flop:.2f}" if self.reference else NONE

    def _published(self, row: Row) -> str:
        found = None if row.setting else published(row.method, row.variant, row.backbone)
        return f"{found.last:.1f}" if found else NONE

    def _published_cost(self, row: Row) -> str:
        found = published(row.method, row.variant, row.backbone)
        if found is None:
            return NONE
        return f"{NONE if found.gflop is None else found.gflop} / {found.last:.1f}"


def _last(row: Row) -> float:
    return row.courses[0].last.accuracy if (found := row.spread("last")) is None else found.mean


def changes_sizes_only(setting: str) -> bool:
    return all(one.partition("=")[0] in SIZES for one in filter(None, setting.split(",")))


def without_setting(row: Row) -> tuple[str, str, str]:
    """Name the same method with the numbers of the preset."""
    return (row.method, row.variant, "")


def shown_metric(name: str) -> Column:
    return METRICS[name], lambda row: with_error(row.spread(name), show=hundredths)


def attention_column(group: str, place: int) -> Column:
    """Show the share of a group of pairs (place 0) or the mean of one pair (place 1)."""

    def show(row: Row) -> str:
        told = [course.last.attention for course in row.courses]
        found = spread(one[group][place] if one and group in one else None for one in told)
        if found is None or place == 0:
            return with_error(found, show=hundredths)
        return f"{100 * found.mean:.3f}"  # a pair is one of hundreds

    return f"{group}, {'mean of a pair' if place else 'share'}", show


def with_error(found: Spread | None, *, show: Callable[[float | None], str]) -> str:
    """Write a mean, and its standard error where there is one: 41.2 ± 0.3."""
    if found is None:
        return NONE
    error = "" if found.error is None else f" ± {100 * found.error:.1f}"
    return show(found.mean) + error


def hundredths(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f}"


def signed(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:+.1f}".replace("-", "−")


def cost(row: Row) -> str:
    return gflop(row.last.flop)


def served(row: Row) -> str:
    return NONE if row.last.served_flop is None else gflop(row.last.served_flop)


def gflop(flop: int) -> str:
    return f"{flop / 1e9:.3f}"


def parameters(row: Row) -> str:
    return f"{row.last.parameters / 1e6:.2f} M"


def passes(row: Row) -> str:
    return str(row.last.passes)


def seeds(row: Row) -> str:
    return str(len(row.courses))


def cpu_minutes(row: Row) -> str:
    """Write the mean; a cell that went on after a stop counts its last run only."""
    least = "≥ " if any(course.was_resumed for course in row.courses) else ""
    return f"{least}{row.cpu_s / 60:.0f}"
