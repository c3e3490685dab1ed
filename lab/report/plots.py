"""Draw the plots of the report as SVG files that are readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 500, 360, 48, 126, 36, 46
LINE_HEIGHT = 15
MEAN_CHARACTER = 7.6
COLOURS = (
    ("#0b6e58", "#5fd1b3"), ("#b4560f", "#f2a65e"), ("#3556b8", "#8fa8ff"),
    ("#9c2f63", "#f08fbb"), ("#66770f", "#c3d45a"), ("#6b46a8", "#c3a3f7"),
    ("#a52c22", "#ff8f85"), ("#1d7796", "#6cc5e6"), ("#5a5f66", "#b4bcc6"),
    ("#7a5a1e", "#d8b46a"),
)  # fmt: skip
"""On light and on dark pages."""
DASHES = ("", "7 4", "2 4", "9 3 2 3")


def _style() -> str:
    light = "".join(_colour(place, one) for place, (one, _) in enumerate(COLOURS))
    dark = "".join(_colour(place, one) for place, (_, one) in enumerate(COLOURS))
    return (
        ".plot text{font:13px system-ui,sans-serif;fill:#4d555e}.plot .title{font-weight:600;"
        "fill:#1f2328}.plot .page{fill:#fff}.plot .rule{stroke:#dfe3e8}.plot .axis{stroke:#8b949e}"
        ".plot .line,.plot .error{fill:none;stroke-width:2}.plot .error{stroke-width:1.3}"
        ".plot .lead{stroke-width:.8;fill:none;opacity:.6}" + light + "@media(prefers-color-scheme:"
        "dark){.plot text{fill:#a8b2bd}.plot .title{fill:#f0f6fc}.plot .page{fill:#0d1117}"
        ".plot .rule{stroke:#2b323a}.plot .axis{stroke:#6b7580}" + dark + "}"
    )


def _colour(place: int, colour: str) -> str:
    return (
        f".plot .c{place}{{stroke:{colour}}}.plot .d{place}{{fill:{colour}}}"
        f".plot text.t{place}{{fill:{colour}}}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: float
    y: float
    error: float | None = None
    """The standard error of `y`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    colour: int
    points: tuple[Point, ...]
    dash: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A scale from values to pixels, with the values that are written beside it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        scale: Callable[[float], float] = math.log if self.logarithmic else float
        low, high = scale(self.low), scale(self.high)
        return (scale(value) - low) / (high - low)

    @classmethod
    def around(cls, values: Sequence[float], *, zero: bool = False) -> Axis:
        """Choose round ticks so that all values lie between the first and the last one."""
        low, high = (0.0 if zero else min(values)), max(values)
        size = (high - low) / 5 or abs(high) / 5 or 1.0
        power = 10.0 ** math.floor(math.log10(size))
        step = power * next(one for one in (1, 2, 5, 10) if one * power >= size * 0.999)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        last = max(last, first + 1)
        ticks = tuple(round(place * step, 10) for place in range(first, last + 1))
        return cls(low=ticks[0], high=ticks[-1], ticks=ticks)

    @classmethod
    def logarithm(cls, values: Sequence[float]) -> Axis:
        """Leave room at both ends, with ticks at 1, 2 and 5 times powers of ten."""
        low, high = min(values) / 1.35, max(values) * 1.35
        powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        round_ones = (one * 10.0**power for power in powers for one in (1, 2, 5))
        ticks = tuple(one for one in round_ones if low <= one <= high)
        return cls(low=low, high=high, ticks=ticks, logarithmic=True)

    @classmethod
    def at(cls, values: Sequence[float]) -> Axis:
        """Put a tick at each value: there are few of them."""
        ticks = tuple(sorted(set(values)))
        room = 0.03 * (ticks[-1] - ticks[0]) or 1.0
        return cls(low=ticks[0] - room, high=ticks[-1] + room, ticks=ticks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    title: str
    x_title: str
    y_title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    right: int = RIGHT

    def lines(self) -> str:
        """Draw each series as a line, and its name at its end."""
        ways = [part for one in self.series for part in self._line(one)]
        return self._svg([*self._frame(), *ways, *self._names_at_ends()])

    def dots(self) -> str:
        """Draw each series as a dot with its name beside it, where there is room for it."""
        dots = [part for one in self.series for part in self._marks(one, radius=5)]
        return self._svg([*self._frame(), *dots, *self._names_beside()])

    def _svg(self, parts: Sequence[str]) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" width="{WIDTH}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" aria-label="{escape(self.title)}">'
            f"<style>{_style()}</style>"
            f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>\n'
            + "\n".join(parts)
            + "\n</svg>\n"
        )

    def _frame(self) -> Iterator[str]:
        bottom, end = HEIGHT - BOTTOM, WIDTH - self.right
        yield f'<text class="title" x="{LEFT}" y="20">{escape(self.title)}</text>'
        for tick in self.y.ticks:
            y = self._y(tick)
            yield f'<line class="rule" x1="{LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield _text(LEFT - 7, y + 4, f"{tick:g}", anchor="end")
        for tick in self.x.ticks:
            x = self._x(tick)
            yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
            yield _text(x, bottom + 18, f"{tick:g}", anchor="middle")
        yield f'<line class="axis" x1="{LEFT}" x2="{end}" y1="{bottom}" y2="{bottom}"/>'
        yield _text((LEFT + end) / 2, HEIGHT - 8, self.x_title, anchor="middle")
        middle = (TOP + bottom) / 2
        yield (
            f'<text transform="translate(13 {middle:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_title)}</text>"
        )

    def _line(self, one: Series) -> Iterator[str]:
        way = " ".join(f"{self._x(p.x):.1f},{self._y(p.y):.1f}" for p in one.points)
        dash = DASHES[one.dash % len(DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        yield f'<polyline class="line c{one.colour}"{dashed} points="{way}"/>'
        yield from self._marks(one, radius=3)

    def _marks(self, one: Series, *, radius: int) -> Iterator[str]:
        for point in one.points:
            x, y = self._x(point.x), self._y(point.y)
            told = f"{one.name}: {point.y:.3g} at {point.x:.3g}"
            if point.error:
                low, high = self._y(point.y - point.error), self._y(point.y + point.error)
                told += f", standard error {point.error:.2g}"
                yield f'<path class="error c{one.colour}" d="M{x:.1f} {low:.1f}V{high:.1f}"/>'
            yield (
                f'<circle class="d{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
                f"<title>{escape(told)}</title></circle>"
            )

    def _names_at_ends(self) -> Iterator[str]:
        """Write the names from top to bottom, moved apart where they would overlap."""
        ends = sorted(self.series, key=lambda one: -one.points[-1].y)
        wanted = [self._y(one.points[-1].y) for one in ends]
        for one, y, at in zip(ends, wanted, apart(wanted), strict=True):
            x, name_x = self._x(one.points[-1].x) + 5, WIDTH - self.right + 22
            yield f'<path class="lead c{one.colour}" d="M{x:.1f} {y:.1f}L{name_x - 3} {at:.1f}"/>'
            yield _text(name_x, at + 4, one.name, kind=f"t{one.colour}")

    def _names_beside(self) -> Iterator[str]:
        dots = [(self._x(p.x), self._y(p.y)) for one in self.series for p in one.points]
        taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in dots]
        for one in self.series:
            x, y = self._x(one.points[0].x), self._y(one.points[0].y)
            width = MEAN_CHARACTER * len(one.name)
            boxes = [_box(x, y, width, place) for place in PLACES]
            best = min(boxes, key=lambda box: sum(_overlap(box, other) for other in taken))
            taken.append(best)
            yield _text(best[0], best[3] - 4, one.name, kind=f"t{one.colour}")

    def _x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - self.right) * self.x.share(value)

    def _y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - self.y.share(value))


Box = tuple[float, float, float, float]
PLACES = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1))
"""Places of a name around its dot: to the right, to the left, above, below, and at the corners."""


def _box(x: float, y: float, width: float, place: tuple[int, int]) -> Box:
    across, down = place
    left = x + {1: 9.0, -1: -9.0 - width, 0: -width / 2}[across]
    top = y - LINE_HEIGHT / 2 + down * (LINE_HEIGHT if across == 0 else LINE_HEIGHT * 0.8)
    return (left, top, left + width, top + LINE_HEIGHT)


def _overlap(one: Box, other: Box) -> float:
    """Compute the area that two boxes share; outside the plot counts as taken."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    outside = max(0.0, one[2] - WIDTH) + max(0.0, LEFT - one[0]) + max(0.0, TOP - one[1])
    return max(0.0, width) * max(0.0, height) + 100 * outside


def apart(wanted: Sequence[float]) -> list[float]:
    """Move heights, which ascend, apart by a line at least, and keep them in the plot."""
    most = HEIGHT - 6.0
    heights: list[float] = []
    for height in wanted:
        heights.append(max(height, heights[-1] + LINE_HEIGHT if heights else TOP))
    for place in reversed(range(len(heights))):
        heights[place] = min(heights[place], most)
        most = heights[place] - LINE_HEIGHT
    return heights


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
