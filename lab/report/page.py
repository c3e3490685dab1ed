"""Write the report as Markdown, as HTML, and its figures as SVG files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from lab.plan import CLAIMS, SYSTEMS, Planned, Step, plan_of, steps
from lab.presets import CIFAR_CLASSES, Preset, preset_named
from lab.protocol import TRIAL_TEST
from lab.report import text
from lab.report.figures import Figure, figures
from lab.report.metrics import Course, courses_of, rows_of
from lab.report.tables import Table, Tables
from lab.results import Line
from model_store.errors import WriteFailed
from model_store.tables import counted

TITLE = "Comparisons"
MOST_NAMED = 4
"""Missing cells of one seed that are named."""
SUPERSEDED = ("short",)
"""Presets that stand in the notebook alone: their networks had hardly learnt (ADR 132)."""
NOTES_TITLE = "Where the order differs from the paper's"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root{color-scheme:light dark;--page:#f6f7f5;--card:#fff;--line:#d9ddd7;--text:#1c211e;
--soft:#5b645e}
@media(prefers-color-scheme:dark){:root{--page:#131715;--card:#1c211f;--line:#343b37;
--text:#e8ece9;--soft:#a3aea8}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,sans-serif}
main{max-width:80rem;margin:0 auto;padding:1.5rem 1.25rem 3rem}
h1{margin:0;font-size:1.5rem}h2{margin:0 0 .2rem;font-size:1.1rem}
h3{margin:1.1rem 0 .3rem;font-size:1rem}
p{margin:.2rem 0 .8rem;color:var(--soft);max-width:52rem;overflow-wrap:anywhere}
ul{margin:.3rem 0 .6rem;padding-left:1.2rem;color:var(--soft);max-width:52rem}
strong{color:var(--text)}code{font-size:.92em;overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;
padding:1.1rem 1.25rem;margin-top:1rem;overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.93rem}
th{color:var(--soft);font-weight:500;vertical-align:bottom}
th,td{text-align:right;padding:.3rem .5rem;border-bottom:1px solid var(--line)}
td{white-space:nowrap}
th:first-child,td:first-child{position:sticky;left:0;background:var(--card);text-align:left}
td:first-child{min-width:6.5rem;white-space:normal}
tr:last-child td{border-bottom:0}
svg{display:block;width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:var(--soft)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
.plot{max-width:44rem}main .plot .page{fill:none}
@media(max-width:40rem){main{padding:1rem .6rem 2rem}section{padding:.9rem .8rem}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    markdown: str
    figures: tuple[Figure, ...]

    def write(self, out: Path) -> list[Path]:
        """Write `out`, an HTML page beside it, and a folder of figures. Return the paths."""
        pages = {out: self.markdown, out.with_suffix(".html"): html(self)}
        drawn = {out.with_suffix("") / f"{one.name}.svg": one.svg for one in self.figures}
        try:
            for path, content in {**pages, **drawn}.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise WriteFailed(f"cannot write {path}: {error.strerror}") from error
        return [*pages, *drawn]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The lines of one preset, and the rows that it should have."""

    preset: str
    lines: Sequence[Line]
    plan: Sequence[Planned]

    @classmethod
    def of(cls, preset: str, lines: Sequence[Line]) -> Part:
        return cls(preset=preset, lines=lines, plan=plan_of(preset))

    @property
    def tables(self) -> Tables:
        return Tables(rows=rows_of(courses_of(self.lines)), plan=self.plan)

    @property
    def steps(self) -> list[Step]:
        return steps(self.lines, preset=self.preset, plan=self.plan)

    @property
    def is_superseded(self) -> bool:
        return self.preset in SUPERSEDED


def make_report(parts: Sequence[Part], *, folder: str, notes: str = "") -> Report:
    """Report on presets, each by itself. `folder` is the place of the figures, beside the page."""
    main = [part for part in parts if not part.is_superseded]
    drawn = {part.preset: tuple(figures(part.tables, part.preset)) for part in main}
    sections = [
        f"# {TITLE}",
        text.INTRODUCTION,
        "## What is shown, and what is not",
        text.CLAIMS,
        *[said for part in main for said in _claims(part)],
        f"## {NOTES_TITLE}",
        notes.strip() or "Nothing is written down yet.",
        "## What cannot be claimed",
        text.CANNOT_BE_CLAIMED,
        "## How to read the tables",
        text.METRICS,
        *[said for part in main for said in _whole(part, drawn[part.preset], folder)],
        *_origin([line for part in main for line in part.lines]),
    ]
    every = tuple(one for some in drawn.values() for one in some)
    return Report(markdown="\n\n".join(sections) + "\n", figures=every)


def _whole(part: Part, drawn: Sequence[Figure], folder: str) -> Iterator[str]:
    preset = preset_named(part.preset)
    yield f"## {_title(part)}"
    yield _setting(preset, part.preset)
    yield from _main_tables(part.tables)
    yield from _figures(drawn, folder)
    yield from _ablations(part.tables, part.plan)
    yield "### What is missing"
    yield from _missing(courses_of(part.lines), part.steps)


def _title(part: Part) -> str:
    pretrained = preset_named(part.preset).pretrained
    return f"{'On a pre-trained start' if pretrained else 'From random weights'}: `{part.preset}`"


def _claims(part: Part) -> Iterator[str]:
    table = part.tables.claims(CLAIMS.get(part.preset, ()))
    if table.rows:
        yield f"{_title(part)}:"
        yield markdown_table(table)


def notes_in(page: str) -> str:
    """Return the notes of a report, or a whole text that is no report."""
    _, heading, rest = page.partition(f"## {NOTES_TITLE}\n")
    return rest.partition("\n## ")[0].strip() if heading else page


def _setting(preset: Preset, name: str) -> str:
    return (
        f"{_tasks(preset, name)} {_networks(preset)} The first task takes "
        f"{counted(preset.first_epochs, 'epoch')}, each later one {preset.epochs}"
        + (f", and balanced tuning {preset.tuning_epochs}" if preset.tuning_epochs else "")
        + (f"; pre-trained weights change in {preset.fine_epochs}" if preset.fine_epochs else "")
        + f". Recipe: {preset.recipe}."
    )


def _tasks(preset: Preset, name: str) -> str:
    images = "all" if preset.images is None else f"{preset.images}"
    test = (
        "the whole test set of them"
        if preset.part == "table" or preset.table_classes
        else f"{TRIAL_TEST} others to test on, none of them in the table of another preset"
    )
    pool = f" of {preset.table_classes} that no choice was made on" if preset.table_classes else ""
    return (
        f"`{name}` has {preset.classes or CIFAR_CLASSES} classes{pool}, {preset.first} in the "
        f"first task and {preset.step} in each later one; {images} training images a class, and "
        f"{test}; {preset.memory} exemplars in all."
    )


def _networks(preset: Preset) -> str:
    if preset.pretrained:
        return (
            f"All rows begin with the vision transformer `{preset.pretrained}` at "
            f"{preset.image_size} pixels; no class that it knows is answered, and every task has "
            "an expert, where there are experts."
        )
    return (
        f"The transformer has {preset.heads} heads of 32 channels, "
        f"{counted(preset.depth, 'patch block')} and a class-attention block. The ResNet-18 begins "
        f"with {preset.resnet_width} channels."
    )


def _main_tables(tables: Tables) -> Iterator[str]:
    if not tables.systems:
        yield "No cell is finished."
        return
    parts = (
        ("Same backbone", text.SAME_BACKBONE, tables.same_backbone()),
        ("Matched cost", text.MATCHED_COST, tables.matched_cost()),
        ("Paired differences to DNE k = 1", text.DIFFERENCES, tables.differences()),
        ("New and old classes", "In per cent; see above.", tables.new_and_old()),
    )
    for title, says, table in parts:
        if table.rows:
            yield f"### {title}"
            yield says
            yield markdown_table(table)


def _figures(drawn: Sequence[Figure], folder: str) -> Iterator[str]:
    for one in drawn:
        yield f"![{one.says}]({folder}/{one.name}.svg)"


def _ablations(tables: Tables, plan: Sequence[Planned]) -> Iterator[str]:
    titles = list(dict.fromkeys(one.section for one in plan if one.section != SYSTEMS))
    found = [(title, tables.ablation(title)) for title in titles]
    shown = [*found, ("Other variants and settings", tables.unplanned())]
    for title, table in shown:
        if table is not None:
            yield f"### {title}"
            yield markdown_table(table)
    attention = tables.attention()
    if attention is not None:
        yield "### Who attends to whom"
        yield text.ATTENTION
        yield markdown_table(attention)


def _missing(courses: Sequence[Course], plan: Sequence[Step]) -> Iterator[str]:
    unfinished = [one for one in courses if not one.is_finished]
    if unfinished:
        told = "\n".join(
            f"- {_cell(one)}: {one.last.task + 1} of {len(one.sizes)} tasks" for one in unfinished
        )
        yield f"Unfinished, and not in the tables:\n\n{told}"
    lacking: dict[str, list[str]] = {}
    for one in plan:
        if one.state in ("missing", "unknown"):
            lacking.setdefault(one.planned.title, []).append(str(one.seed))
    if lacking:
        titles: dict[str, list[str]] = {}
        for title, seeds in lacking.items():
            titles.setdefault(", ".join(seeds), []).append(title)
        rows = "\n".join(f"- seed {seeds}: {_first_of(some)}" for seeds, some in titles.items())
        yield f"Planned, and not begun:\n\n{rows}"
    if not unfinished and not lacking:
        yield "Nothing: every cell of the plan is finished."


def _first_of(titles: Sequence[str]) -> str:
    more = len(titles) - MOST_NAMED
    named = "; ".join(titles[:MOST_NAMED])
    return f"{named}; and {more} more (`python -m lab plan`)" if more > 0 else named


def _cell(course: Course) -> str:
    line = course.last
    options = f":{line.variant}" if line.variant else ""
    setting = f" {line.setting}" if line.setting else ""
    return f"`{line.method}{options}`{setting}, seed {line.seed}"


def _origin(lines: Sequence[Line]) -> Iterator[str]:
    if lines:
        commits = ", ".join(f"`{one}`" for one in sorted({line.commit for line in lines}))
        digests = ", ".join(sorted({f"`{line.data_digest[:12]}…`" for line in lines}))
        yield "## Origin"
        yield (
            f"The archives of images have the SHA-256 {digests}. The lines were written by the "
            f"code of {commits}; a plus marks files that differed from the commit."
        )


def markdown_table(table: Table) -> str:
    marks = ["---" if place < table.words else "---:" for place in range(len(table.titles))]
    rows = [table.titles, marks, *table.rows]
    return "\n".join(f"| {' | '.join(map(_cell_text, row))} |" for row in rows)


def _cell_text(cell: str) -> str:
    return cell.replace("|", "\\|")


def html(report: Report) -> str:
    """Make a page that needs no other file: the figures stand in it."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(report.markdown)
    drawn = {one.name: one.svg for one in report.figures}
    images = r'(?:<p><img src="[^"]*/([\w-]+)\.svg"[^>]*></p>\s*)'
    body = re.sub(images, lambda found: drawn.get(found[1], found[0]), body)
    body = re.sub(r"(<svg.*</svg>)", r'<div class="plots">\1</div>', body, flags=re.DOTALL)
    first, *sections = re.split(r"(?=<h2>)", body)
    cards = "".join(f"<section>{section}</section>" for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE}</title><style>{STYLE}</style></head>"
        f"<body><main>{first}{cards}</main></body></html>\n"
    )
