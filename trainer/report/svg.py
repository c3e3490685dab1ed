"""Draw small plots as inline SVG, with the colours of the page and without other files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from model_store.tables import counted, percent

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 260, 44, 14, 12, 34
SERIES = 8  # colours of the page; further lines repeat them


def lines(
    series: Sequence[tuple[str, Sequence[float | None]]], *, labels: Sequence[str], title: str
) -> str:
    """Draw shares over versions, one line a series, from the first value of each on."""
    plot = [_frame(title), _share_axis()]
    step = (WIDTH - LEFT - RIGHT) / max(1, len(labels) - 1)
    xs = [LEFT + step * index for index in range(len(labels))]
    if len(labels) == 1:
        xs = [(LEFT + WIDTH - RIGHT) / 2]
    every = max(1, -(-len(labels) // 16))
    for x, label in list(zip(xs, labels, strict=True))[::every]:
        plot.append(_text(x, HEIGHT - 12, label, anchor="middle"))
    for index, (name, values) in enumerate(series):
        points = [(x, _y(v), v) for x, v in zip(xs, values, strict=True) if v is not None]
        kind = f"s{index % SERIES}"
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        plot.append(f'<polyline class="line {kind}" points="{way}"/>')
        for x, y, value in points:
            plot.append(
                f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
                f"<title>{escape(name)}: {percent(value)}</title></circle>"
            )
    return "".join([*plot, "</svg>"])


def reliability(bins: Sequence[dict[str, Any]], *, title: str) -> str:
    """Draw accuracy over confidence; on the diagonal the two are equal."""
    side = HEIGHT - TOP - BOTTOM
    most = max((one["images"] for one in bins), default=1)
    plot = [_frame(title, width=LEFT + side + 2 * RIGHT), _share_axis(width=LEFT + side + RIGHT)]
    plot.append(
        f'<line class="ideal" x1="{LEFT}" y1="{_y(0):.1f}" x2="{LEFT + side}" y2="{_y(1):.1f}"/>'
    )
    for one in bins:
        x, y = LEFT + side * one["confidence"], _y(one["accuracy"])
        radius = 4 + 8 * (one["images"] / most) ** 0.5
        plot.append(
            f'<line class="gap" x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" '
            f'y2="{_y(one["confidence"]):.1f}"/>'
            f'<circle class="dot s0" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">'
            f"<title>{counted(one['images'], 'image')}: "
            f"confidence {percent(one['confidence'])}, "
            f"right {percent(one['accuracy'])}</title></circle>"
        )
    for share in (0, 0.5, 1):
        plot.append(
            _text(LEFT + side * share, HEIGHT - 16, percent(share, decimals=0), anchor="middle")
        )
    plot.append(_text(LEFT + side / 2, HEIGHT - 2, "confidence", anchor="middle"))
    return "".join([*plot, "</svg>"])


def stacked(rows: Sequence[tuple[str, float, float]], *, unit: str, title: str) -> str:
    """Draw one column a version: the part shared with its parent, and the new part on top."""
    top = max((old + new for _, old, new in rows), default=1) or 1
    width = (WIDTH - LEFT - RIGHT) / max(1, len(rows))
    thick = min(56.0, width * 0.7)
    plot = [_frame(title)]
    for share in (0, 0.5, 1):
        plot.append(_rule(_y(share)) + _text(LEFT - 6, _y(share) + 4, f"{top * share:.3g}"))
    every = max(1, -(-len(rows) // 16))
    for index, (label, old, new) in enumerate(rows):
        x = LEFT + width * (index + 0.5) - thick / 2
        low, high = _y(old / top), _y((old + new) / top)
        tip = f"<title>version {escape(label)}: {old + new:.3g} {unit}, new {new:.3g}</title>"
        plot.append(
            f'<g>{tip}<rect class="old" x="{x:.1f}" y="{low:.1f}" width="{thick:.1f}" '
            f'height="{_y(0) - low:.1f}"/><rect class="new" x="{x:.1f}" y="{high:.1f}" '
            f'width="{thick:.1f}" height="{low - high:.1f}"/></g>'
        )
        if index % every == 0:
            plot.append(_text(x + thick / 2, HEIGHT - 12, label, anchor="middle"))
    return "".join([*plot, "</svg>"])


def matrix(counts: Sequence[Sequence[int]], *, names: Sequence[str], title: str) -> str:
    """Draw classes as rows and answers as columns; a cell is as dark as its share of the row."""
    size = max(5.0, min(34.0, 560 / max(1, len(names))))
    named = size >= 11
    margin = (
        min(190.0, 14 + 7.6 * max((len(_short(one)) for one in names), default=0)) if named else 8.0
    )
    side = margin + size * len(names) + 8
    plot = [
        f'<svg class="matrix" role="img" viewBox="0 0 {side:.0f} {side:.0f}" '
        f'style="max-width:{side:.0f}px"><title>{escape(title)}</title>'
        f'<rect class="cell" x="{margin:.1f}" y="{margin:.1f}" '
        f'width="{size * len(names):.1f}" height="{size * len(names):.1f}"/>'
    ]
    for row, (name, line) in enumerate(zip(names, counts, strict=True)):
        total = sum(line)
        y = margin + size * row
        if named:
            plot.append(_text(margin - 5, y + size / 2 + 4, _short(name)))
            plot.append(
                f'<text transform="translate({y + size / 2 + 4:.1f} {margin - 5:.1f}) rotate(-90)">'
                f"{escape(_short(name))}</text>"
            )
        for column, count in enumerate(line):
            if not count:
                continue  # most cells of a large matrix are empty
            kind = "right" if row == column else "wrong"
            x, share = margin + size * column, count / total
            tip = f"{count} of {total}: {name} taken for {names[column]}"
            plot.append(
                f'<g><title>{escape(tip)}</title><rect class="{kind}" fill-opacity="{share:.2f}" '
                f'x="{x:.1f}" y="{y:.1f}" width="{size - 1:.1f}" height="{size - 1:.1f}"/>'
            )
            if size >= 20:
                on = ' class="on"' if share > 0.55 else ""
                at = f'x="{x + size / 2:.1f}" y="{y + size / 2 + 4:.1f}"'
                plot.append(f'<text{on} text-anchor="middle" {at}>{count}</text>')
            plot.append("</g>")
    return "".join([*plot, "</svg>"])


def _short(name: str) -> str:
    return name if len(name) <= 24 else name[:23] + "…"


def _frame(title: str, *, width: int = WIDTH) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {width} {HEIGHT}" style="max-width:{1.5 * width:.0f}px">'
        f"<title>{escape(title)}</title>"
    )


def _share_axis(*, width: int = WIDTH) -> str:
    return "".join(
        _rule(_y(share), width=width) + _text(LEFT - 6, _y(share) + 4, percent(share, decimals=0))
        for share in (0, 0.25, 0.5, 0.75, 1)
    )


def _y(share: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def _rule(y: float, *, width: int = WIDTH) -> str:
    return f'<line class="rule" x1="{LEFT}" y1="{y:.1f}" x2="{width - RIGHT}" y2="{y:.1f}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "end") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
