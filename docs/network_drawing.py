"""Draw network.svg: how a new expert reads older ones, and how the classifier reads all of them.

python -m docs.network_drawing
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs.pen import arrow, box, head, page, text

FILE = Path(__file__).with_name("network.svg")
WIDTH, HEIGHT = 560, 424
EXPERTS = ("expert 1", "expert 2")
NOTES = ("frozen", "new")
COLUMN_W, COLUMN_GAP, LEFT = 150, 70, 150
BLOCKS = 2
BLOCK_H, STEP = 30, 40
TOLD = (
    "Two experts stand side by side, and an image enters both from below. In each block an expert "
    "first attends to the patches of the image by itself. Then the younger expert reads the older "
    "one; no arrow goes back. At the top the tokens of both are joined, and one task head for each "
    "task reads the joined token."
)


def svg() -> str:
    """Return the drawing as text."""
    parts = [*_answer(28), *_experts(132), *_image(366)]
    return page(WIDTH, HEIGHT, shown=560, told=TOLD, parts=parts)


def _answer(top: int) -> Iterator[str]:
    for place, name in enumerate(("animals", "vehicles")):
        x = _x(place)
        yield box(x, top, width=COLUMN_W, height=BLOCK_H, radius=5)
        yield text(x + COLUMN_W // 2, top + 20, f"task head: {name}", "note", middle=True)
        middle = x + COLUMN_W // 2
        yield f'<path class="line" d="M{middle} {top + 64} V{top + 36}"/>' + head(
            middle, top + 32, "up"
        )
    yield text(16, top + 20, "classifier", "title")
    yield text(16, top + 84, "joined token", "title")
    half = COLUMN_W + COLUMN_GAP // 2
    for place, kind in enumerate(("old", "new")):
        x = _x(0) + place * half
        yield box(x, top + 66, width=half, height=26, kind=kind, radius=5)
        yield text(x + half // 2, top + 84, f"token {place + 1}", f"note {kind}-name", middle=True)
    yield text(_x(1) - COLUMN_GAP // 2, top + 54, "both read all of it", "note", middle=True)


def _experts(top: int) -> Iterator[str]:
    height = 2 * BLOCKS * STEP + 46
    for place, (name, note) in enumerate(zip(EXPERTS, NOTES, strict=True)):
        x, middle = _x(place), _x(place) + COLUMN_W // 2
        yield f'<path class="line" d="M{middle} {top + 8} V{top - 6}"/>' + head(
            middle, top - 10, "up"
        )
        yield box(x - 10, top + 10, width=COLUMN_W + 20, height=height)
        yield text(middle, top + height + 2, f"{name}, {note}", "title", middle=True)
    for block in range(BLOCKS):
        y = top + 20 + 2 * block * STEP
        yield text(16, y + STEP + 2, f"block {BLOCKS - block}", "title")
        yield from _block(y)
    yield text(_x(1) - COLUMN_GAP // 2, top + 2 * STEP + 22, "reads", "note", middle=True)


def _block(y: int) -> Iterator[str]:
    """Draw a block: spatial attention below, task attention above, read from left to right."""
    for place, kind in enumerate(("old", "new")):
        x, middle = _x(place), _x(place) + COLUMN_W // 2
        for row, name in enumerate(("task attention", "spatial attention")):
            top = y + row * STEP
            yield box(x, top, width=COLUMN_W, height=BLOCK_H, kind=kind, radius=5)
            yield text(middle, top + 20, name, f"note {kind}-name", middle=True)
    middle_y = y + BLOCK_H // 2
    yield arrow(_x(0) + COLUMN_W, middle_y, _x(1), middle_y)


def _image(top: int) -> Iterator[str]:
    """Draw the way of the image into every expert, from `top` downwards."""
    yield text(16, top + 40, "image", "title")
    yield text(_x(1) - COLUMN_GAP // 2, top + 40, "its patches", "note", middle=True)
    for place in range(len(EXPERTS)):
        middle = _x(place) + COLUMN_W // 2
        side = _x(1) - COLUMN_GAP // 2 + (2 * place - 1) * 40
        yield f'<path class="line" d="M{side} {top + 36} H{middle} V{top - 6}"/>' + head(
            middle, top - 12, "up"
        )


def _x(place: int) -> int:
    return LEFT + place * (COLUMN_W + COLUMN_GAP)


if __name__ == "__main__":
    FILE.write_text(svg())
