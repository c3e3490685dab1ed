"""The parts that the drawings share: one style for light and dark, text, boxes and arrows."""

from __future__ import annotations

from xml.sax.saxutils import escape

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


def page(width: int, height: int, *, shown: int, told: str, parts: list[str]) -> str:
    """Put the parts on a page of its own ground, `shown` pixels wide, and tell it in words."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{shown}" viewBox="0 0 {width} {height}" '
        'role="img" aria-labelledby="title">',
        f'<title id="title">{escape(told)}</title>',
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="12"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(x: int, y: int, words: str, kind: str = "", *, middle: bool = False) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text class="{kind}" x="{x}" y="{y}"{anchor}>{escape(words)}</text>'


def box(x: int, y: int, *, width: int, height: int, kind: str = "box", radius: int = 8) -> str:
    size = f'width="{width}" height="{height}" rx="{radius}"'
    return f'<rect class="{kind}" x="{x}" y="{y}" {size}/>'


def arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    return f'<path class="line" d="M{x} {y} L{to_x - 5} {to_y}"/>' + head(to_x, to_y, "right")


def head(x: int, y: int, way: str) -> str:
    points = {
        "right": ((x, y), (x - 7, y - 4), (x - 7, y + 4)),
        "up": ((x, y), (x - 4, y + 7), (x + 4, y + 7)),
    }[way]
    return f'<polygon class="head" points="{" ".join(f"{a},{b}" for a, b in points)}"/>'
