"""Draw growth.svg: how the network grows, is kept, and is served.

python -m docs.drawing
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

FILE = Path(__file__).with_name("growth.svg")
WIDTH, HEIGHT = 400, 560
TASKS = ("animals", "vehicles", "plants")
EDGE = 16
BLOCK_W, BLOCK_H, GAP = 62, 30, 6
EXPERTS_X = 172
"""Left edge of the first expert. It is the same in all parts: an expert keeps its column."""

STYLE = """\
  .page { fill: #ffffff; } text { fill: #1f2328; font: 15px system-ui, sans-serif; }
  .title { font-weight: 650; } .note { fill: #59636e; font-size: 13px; }
  .code { font-family: ui-monospace, monospace; font-size: 13px; }
  .box { fill: #f6f8fa; stroke: #d1d9e0; } .line { stroke: #59636e; fill: none; stroke-width: 1.5; }
  .head { fill: #59636e; } .back { stroke-dasharray: 4 3; }
  .old { fill: #dbe7f5; stroke: #7ea3cf; } .new { fill: #1a6fd4; stroke: #1a6fd4; }
  .old-name { fill: #1f4d85; } .new-name { fill: #ffffff; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; } text { fill: #f0f6fc; } .note { fill: #9da7b3; }
    .box { fill: #151b23; stroke: #3d444d; } .line { stroke: #9da7b3; } .head { fill: #9da7b3; }
    .old { fill: #1c2f49; stroke: #4a76ab; } .new { fill: #4493f8; stroke: #4493f8; }
    .old-name { fill: #b6d3f5; } .new-name { fill: #06121f; }
  }"""
TOLD = (
    "A folder of images becomes one new expert; older experts stay as they are. The store keeps "
    "each expert once. A channel names one version, and servers serve it. A rollback moves the "
    "channel."
)


def svg() -> str:
    """Return the drawing as text."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="480" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'role="img" aria-labelledby="title">',
        f'<title id="title">{TOLD}</title>',
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="12"/>',
        *_learn(30),
        *_keep(214),
        *_serve(420),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _learn(top: int) -> Iterator[str]:
    yield _text(EDGE, top, "1. Learn: a folder becomes an expert", "title")
    yield _text(EDGE, top + 20, "Older experts are never changed.", "note")
    for row, task in enumerate(TASKS):
        y = top + 36 + row * 42
        middle = y + BLOCK_H // 2
        yield _text(EDGE, middle + 5, f"{task}/", "code")
        yield _arrow(92, middle, 112, middle)
        yield _text(120, middle + 5, f"v{row + 1}")
        yield _arrow(142, middle, EXPERTS_X - 6, middle)
        for place in range(row + 1):
            yield from _expert(place, y, new=place == row)


def _keep(top: int) -> Iterator[str]:
    yield _text(EDGE, top, "2. Keep: the store has each expert once", "title")
    yield _text(EDGE, top + 20, "Nothing is overwritten. A version names its experts.", "note")
    yield _box(top + 34, height=92)
    yield _text(EDGE + 12, top + 65, "experts", "note")
    yield _text(EDGE + 12, top + 107, "versions", "note")
    for place in range(len(TASKS)):
        yield from _expert(place, top + 45, new=False)
        yield _text(_column(place), top + 107, f"v{place + 1}", middle=True)
    newest, before, y = _column(2), _column(1), top + 160
    yield _text(EDGE, y + 5, "production", "code")
    yield f'<path class="line" d="M98 {y} H{newest} V{top + 118}"/>' + _head(
        newest, top + 114, "up"
    )
    yield f'<path class="line back" d="M{before} {y} V{top + 118}"/>' + _head(
        before, top + 114, "up"
    )
    yield _text(before - 6, y + 18, "rollback", "note", middle=True)


def _serve(top: int) -> Iterator[str]:
    yield _text(EDGE, top, "3. Serve: servers follow the channel", "title")
    yield _text(EDGE, top + 20, "No request fails during a swap.", "note")
    yield _box(top + 34, height=52)
    yield _text(EDGE + 12, top + 65, "dne-serve", "code")
    for place in range(len(TASKS)):
        yield from _expert(place, top + 45, new=False)
    y = top + 112
    yield _text(EDGE, y + 5, "photo.jpg", "code")
    yield f'<path class="line" d="M92 {y} H128 V{top + 90}"/>' + _head(128, top + 88, "up")
    yield f'<path class="line" d="M{_column(0)} {top + 88} V{y} H{_column(0) + 22}"/>'
    yield _head(_column(0) + 24, y, "right")
    yield _text(_column(0) + 34, y + 5, "bus, by version 3")


def _box(y: int, *, height: int) -> str:
    width = WIDTH - 2 * EDGE
    return f'<rect class="box" x="{EDGE}" y="{y}" width="{width}" height="{height}" rx="8"/>'


def _expert(place: int, y: int, *, new: bool) -> Iterator[str]:
    kind, x = "new" if new else "old", EXPERTS_X + place * (BLOCK_W + GAP)
    yield f'<rect class="{kind}" x="{x}" y="{y}" width="{BLOCK_W}" height="{BLOCK_H}" rx="5"/>'
    yield _text(x + BLOCK_W // 2, y + 20, TASKS[place], f"note {kind}-name", middle=True)


def _column(place: int) -> int:
    return EXPERTS_X + place * (BLOCK_W + GAP) + BLOCK_W // 2


def _text(x: int, y: int, words: str, kind: str = "", *, middle: bool = False) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text class="{kind}" x="{x}" y="{y}"{anchor}>{escape(words)}</text>'


def _arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    return f'<path class="line" d="M{x} {y} L{to_x - 5} {to_y}"/>' + _head(to_x, to_y, "right")


def _head(x: int, y: int, way: str) -> str:
    points = {
        "right": ((x, y), (x - 7, y - 4), (x - 7, y + 4)),
        "up": ((x, y), (x - 4, y + 7), (x + 4, y + 7)),
    }[way]
    return f'<polygon class="head" points="{" ".join(f"{a},{b}" for a, b in points)}"/>'


if __name__ == "__main__":
    FILE.write_text(svg())
