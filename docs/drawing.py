"""Draw growth.svg: how the network grows, is kept, and is served.

python -m docs.drawing
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs.pen import arrow, box, head, page, text

FILE = Path(__file__).with_name("growth.svg")
WIDTH, HEIGHT = 400, 560
TASKS = ("animals", "vehicles", "plants")
EDGE = 16
BLOCK_W, BLOCK_H, GAP = 62, 30, 6
EXPERTS_X = 172
"""Left edge of the first expert. It is the same in all parts: an expert keeps its column."""

TOLD = (
    "A folder of images becomes one new expert; older experts stay as they are. The store keeps "
    "each expert once. A channel names one version, and servers serve it. A rollback moves the "
    "channel."
)


def svg() -> str:
    """Return the drawing as text."""
    parts = [*_learn(30), *_keep(214), *_serve(420)]
    return page(WIDTH, HEIGHT, shown=480, told=TOLD, parts=parts)


def _learn(top: int) -> Iterator[str]:
    yield text(EDGE, top, "1. Learn: a folder becomes an expert", "title")
    yield text(EDGE, top + 20, "Older experts are never changed.", "note")
    for row, task in enumerate(TASKS):
        y = top + 36 + row * 42
        middle = y + BLOCK_H // 2
        yield text(EDGE, middle + 5, f"{task}/", "code")
        yield arrow(92, middle, 112, middle)
        yield text(120, middle + 5, f"v{row + 1}")
        yield arrow(142, middle, EXPERTS_X - 6, middle)
        for place in range(row + 1):
            yield from _expert(place, y, new=place == row)


def _keep(top: int) -> Iterator[str]:
    yield text(EDGE, top, "2. Keep: the store has each expert once", "title")
    yield text(EDGE, top + 20, "Nothing is overwritten. A version names its experts.", "note")
    yield box(EDGE, top + 34, width=WIDTH - 2 * EDGE, height=92)
    yield text(EDGE + 12, top + 65, "experts", "note")
    yield text(EDGE + 12, top + 107, "versions", "note")
    for place in range(len(TASKS)):
        yield from _expert(place, top + 45, new=False)
        yield text(_column(place), top + 107, f"v{place + 1}", middle=True)
    newest, before, y = _column(2), _column(1), top + 160
    yield text(EDGE, y + 5, "production", "code")
    yield f'<path class="line" d="M98 {y} H{newest} V{top + 118}"/>' + head(newest, top + 114, "up")
    yield f'<path class="line back" d="M{before} {y} V{top + 118}"/>' + head(
        before, top + 114, "up"
    )
    yield text(before - 6, y + 18, "rollback", "note", middle=True)


def _serve(top: int) -> Iterator[str]:
    yield text(EDGE, top, "3. Serve: servers follow the channel", "title")
    yield text(EDGE, top + 20, "No request fails during a swap.", "note")
    yield box(EDGE, top + 34, width=WIDTH - 2 * EDGE, height=52)
    yield text(EDGE + 12, top + 65, "dne-serve", "code")
    for place in range(len(TASKS)):
        yield from _expert(place, top + 45, new=False)
    y = top + 112
    yield text(EDGE, y + 5, "photo.jpg", "code")
    yield f'<path class="line" d="M92 {y} H128 V{top + 90}"/>' + head(128, top + 88, "up")
    yield f'<path class="line" d="M{_column(0)} {top + 88} V{y} H{_column(0) + 22}"/>'
    yield head(_column(0) + 24, y, "right")
    yield text(_column(0) + 34, y + 5, "bus, by version 3")


def _expert(place: int, y: int, *, new: bool) -> Iterator[str]:
    kind, x = "new" if new else "old", EXPERTS_X + place * (BLOCK_W + GAP)
    yield box(x, y, width=BLOCK_W, height=BLOCK_H, kind=kind, radius=5)
    yield text(x + BLOCK_W // 2, y + 20, TASKS[place], f"note {kind}-name", middle=True)


def _column(place: int) -> int:
    return EXPERTS_X + place * (BLOCK_W + GAP) + BLOCK_W // 2


if __name__ == "__main__":
    FILE.write_text(svg())
