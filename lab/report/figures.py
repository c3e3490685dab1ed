"""Choose the figures of the report: accuracy, cost against accuracy, growth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lab.registry import METHODS
from lab.report.metrics import RESNET, TRANSFORMER, Row, spread
from lab.report.plots import COLOURS, Axis, Plot, Point, Series
from lab.report.tables import REFERENCE, Tables
from lab.results import Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    """The name of the file."""
    says: str
    svg: str


def figures(tables: Tables, preset: str) -> list[Figure]:
    """Draw all figures of a preset that there are rows for."""
    rows = [row for row in tables.systems if not row.setting]
    drawn = [*_accuracies(tables, rows), *_trade_off(tables), *_growth(tables, rows)]
    return [replace(one, name=f"{preset}-{one.name}") for one in drawn]


def _accuracies(tables: Tables, rows: Sequence[Row]) -> Iterator[Figure]:
    for backbone, name in ((TRANSFORMER, "accuracy-transformer"), (RESNET, "accuracy-resnet")):
        chosen = [row for row in rows if row.backbone == backbone]
        if not chosen:
            continue
        beside = [row for row in rows if row.key == REFERENCE and row not in chosen]
        series = _series(tables, [*beside, *chosen], _accuracy)
        title = f"Accuracy of all classes so far, on the {backbone}"
        yield Figure(
            name=name,
            says=f"{title}. Bars are standard errors.",
            svg=_lines(series, title=title, x_title="classes", y_title="accuracy, %"),
        )


def _trade_off(tables: Tables) -> Iterator[Figure]:
    series = [
        Series(name=one.name, colour=one.colour, points=one.points[-1:])
        for one in _series(tables, tables.systems, _last_accuracy_by_cost)
    ]
    if not series:
        return
    title = "Last accuracy against the cost of an answer"
    points = [point for one in series for point in one.points]
    plot = Plot(
        title=title,
        x_title="GFLOP an image (logarithmic)",
        y_title="last accuracy, %",
        x=Axis.logarithm([point.x for point in points]),
        y=Axis.around([value for point in points for value in _reach(point)]),
        series=tuple(series),
        right=24,
    )
    yield Figure(name="cost", says=f"{title}.", svg=plot.dots())


def _growth(tables: Tables, rows: Sequence[Row]) -> Iterator[Figure]:
    grown = [row for row in rows if len(row.courses[0].lines) > 1]
    kinds: tuple[tuple[str, str, str, Callable[[Line], float | None]], ...] = (
        ("growth-parameters", "Parameters by task", "million parameters", _parameters),
        ("growth-flop", "Cost of an answer by task", "GFLOP an image", _gflop),
    )
    for name, title, y_title, value in kinds:
        series = _series(tables, grown, lambda row, value=value: _by_task(row, value))  # type: ignore[misc]
        if name == "growth-flop":
            folded = [row for row in grown if row.key == REFERENCE]
            series += [
                Series(name=f"{one.name}, served", colour=one.colour, dash=1, points=one.points)
                for one in _series(tables, folded, lambda row: _by_task(row, _served))
                if one.points
            ]
        if series:
            svg = _lines(series, title=title, x_title="tasks", y_title=y_title, zero=True)
            yield Figure(name=name, says=f"{title}.", svg=svg)


def _series(
    tables: Tables, rows: Sequence[Row], points: Callable[[Row], tuple[Point, ...]]
) -> list[Series]:
    """Give each method a colour, and its variants dashes."""
    order = {name: place % len(COLOURS) for place, name in enumerate(METHODS)}
    seen: dict[str, int] = {}
    made = []
    for row in rows:
        dash = seen[row.method] = seen.get(row.method, -1) + 1
        colour = order.get(row.method, len(COLOURS) - 1)
        name = tables.title(row)
        made.append(Series(name=name, colour=colour, dash=dash, points=points(row)))
    return [one for one in made if one.points]


def _lines(
    series: Sequence[Series], *, title: str, x_title: str, y_title: str, zero: bool = False
) -> str:
    points = [point for one in series for point in one.points]
    return Plot(
        title=title,
        x_title=x_title,
        y_title=y_title,
        x=Axis.at([point.x for point in points]),
        y=Axis.around([value for point in points for value in _reach(point)], zero=zero),
        series=tuple(series),
    ).lines()


def _reach(point: Point) -> tuple[float, float]:
    return (point.y - (point.error or 0), point.y + (point.error or 0))


def _accuracy(row: Row) -> tuple[Point, ...]:
    return tuple(
        Point(x=lines[0].classes, y=100 * found.mean, error=_hundred(found.error))
        for lines in _tasks(row).values()
        if (found := spread(line.accuracy for line in lines)) is not None
    )


def _last_accuracy_by_cost(row: Row) -> tuple[Point, ...]:
    found = row.spread("last")
    if found is None:
        return ()
    return (Point(x=row.last.flop / 1e9, y=100 * found.mean, error=_hundred(found.error)),)


def _hundred(error: float | None) -> float | None:
    return None if error is None else 100 * error


def _tasks(row: Row) -> Mapping[int, list[Line]]:
    found: dict[int, list[Line]] = {}
    for course in row.courses:
        for line in course.lines:
            found.setdefault(line.task, []).append(line)
    return found


def _by_task(row: Row, value: Callable[[Line], float | None]) -> tuple[Point, ...]:
    lines = row.courses[0].lines
    return tuple(
        Point(x=line.task + 1, y=found) for line in lines if (found := value(line)) is not None
    )


def _parameters(line: Line) -> float:
    return line.parameters / 1e6


def _gflop(line: Line) -> float:
    return line.flop / 1e9


def _served(line: Line) -> float | None:
    return None if line.served_flop is None else line.served_flop / 1e9
