"""Write a report as one HTML page, without scripts, other files or requests to a host."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from model_store.tables import counted, percent, size
from trainer.report.svg import SERIES, lines, matrix, reliability, stacked

STYLE = """
:root{color-scheme:light dark;--page:#f6f7f5;--card:#fff;--line:#d9ddd7;--text:#1c211e;
--soft:#5b645e;--accent:#1d6b58;--accent-soft:#dcece7;--bad:#a12622;--on:#fff}
@media(prefers-color-scheme:dark){:root{--page:#131715;--card:#1c211f;--line:#343b37;
--text:#e8ece9;--soft:#a3aea8;--accent:#6fc7ad;--accent-soft:#21392f;--bad:#ff9d94;--on:#0e1a16}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,sans-serif}
main{max-width:62rem;margin:0 auto;padding:1.5rem 1.25rem 3rem}
h1{margin:0;font-size:1.5rem}h2{margin:0 0 .2rem;font-size:1.1rem}
p{margin:.2rem 0 .8rem;color:var(--soft);max-width:46rem;overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;
padding:1.1rem 1.25rem;margin-top:1rem;overflow-x:auto}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.4rem,1fr));gap:.75rem;
margin-top:1rem}
.tile{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.8rem 1rem}
.tile b{display:block;font-size:1.6rem;line-height:1.2}
.tile span,.tile small{display:block;color:var(--soft)}.tile small{font-size:.8rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.93rem}
th{color:var(--soft);font-weight:500}
th,td{text-align:right;padding:.3rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap}
th.name,td.name{text-align:left}
td.name{white-space:normal;overflow-wrap:anywhere;min-width:7rem}
tr:last-child td{border-bottom:0}
.bar{display:block;width:100%;min-width:7rem;height:.7rem;background:var(--accent-soft);
border-radius:.35rem;overflow:hidden}
.bar i{display:block;height:100%;background:var(--accent)}
svg{display:block;width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:var(--soft)}
.rule{stroke:var(--line)}.line{fill:none;stroke-width:2.5}.dot{stroke:var(--card);stroke-width:1.5}
.ideal{stroke:var(--soft);stroke-dasharray:4 4}.gap{stroke:var(--bad);stroke-width:2}
.old{fill:var(--accent);fill-opacity:.35}.new{fill:var(--accent)}
.cell{fill:var(--accent-soft);fill-opacity:.45}.right{fill:var(--accent)}.wrong{fill:var(--bad)}
svg .on{fill:var(--on)}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:.4rem 0 0;padding:0;list-style:none;
font-size:.9rem}.key i{display:inline-block;width:.75rem;height:.75rem;border-radius:50%;
margin-right:.4rem}
.side{display:grid;grid-template-columns:repeat(auto-fit,minmax(17rem,1fr));gap:1.5rem;
align-items:start}
.note{border-left:3px solid var(--bad);padding-left:.7rem}
"""
COLOURS = ("#1f7a66", "#c26a1b", "#4a67c0", "#a63d6d", "#7a8b1e", "#7a57b0", "#b23a30", "#2d8fb0")
SIDE_BY_SIDE = 12  # classes whose matrix is readable in half of the page
TEXT_COLUMNS = frozenset({"task", "taken for", "what"})
JUDGED_BY = {
    "held-out": "Judged by {}, which no version was trained on.",
    "recorded": "As it was judged when it was published, by {} that the store does not keep.",
    "none": "No images were held out, so there is nothing to judge by.",
}
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: dict[str, Any]) -> str:
    """Write the page. Escape all text from outside: a class may have any name."""
    sections = [
        _heading(report),
        _tiles(report),
        _tasks(report["forgetting"]),
        _classes(report),
        _confusion(report["confusion"]),
        _calibration(report["calibration"]),
        *([_levels(report["levels"])] if report["levels"] else []),
        *([_advice(report["advice"])] if report["advice"] else []),
        _growth(report["growth"]),
    ]
    colours = "".join(
        f".line.s{index}{{stroke:{colour}}}.dot.s{index},i.s{index}"
        f"{{fill:{colour};background:{colour}}}"
        for index, colour in enumerate(COLOURS[:SERIES])
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Version {report['version']}: report</title><style>{STYLE}{colours}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _heading(report: dict[str, Any]) -> str:
    parent = f"on top of version {report['parent']}" if report["parent"] else "the first version"
    when = report["created"][:16].replace("T", " ")
    noun = "held-out image" if report["source"] == "held-out" else "image"
    judged = JUDGED_BY[report["source"]].format(counted(report["images"], noun))
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report["notes"])
    gate = f"The gate: {escape(report['verdict'])}."
    heading = f"<h1>Version {report['version']}</h1>"
    return f"{heading}<p>{when} UTC, {parent}. {judged} {gate}</p>{notes}"


def _tiles(report: dict[str, Any]) -> str:
    accuracy, interval = report["accuracy"], report["accuracy"]["interval"]
    between = f"{percent(interval[0])} to {percent(interval[1])} likely" if interval else ""
    newest = report["growth"][-1]
    tiles = [
        ("accuracy", percent(accuracy["all"]), between),
        ("old classes", percent(accuracy["old"]), "before the newest task"),
        ("new classes", percent(accuracy["new"]), "of the newest task"),
        ("forgetting", _hundredths(report["forgetting"]["average"]), "points since its best"),
        ("calibration", _decimal(report["calibration"]["error"]), "error; 0 is perfect"),
        ("size", size(newest["total_bytes"]), f"new: {size(newest['delta_bytes'])}"),
    ]
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><span>{name}</span><b>{value}</b><small>{more}</small></div>'
            for name, value, more in tiles
        )
        + "</div>"
    )


def _tasks(forgetting: dict[str, Any]) -> str:
    tasks = forgetting["tasks"]
    rows = [
        (
            escape(task["name"]),
            str(task["classes"]),
            percent(task["learnt"]),
            percent(task["now"]),
            _hundredths(task["forgetting"]),
        )
        for task in tasks
    ]
    plot = lines(
        [(task["name"], task["accuracy"]) for task in tasks],
        labels=[f"v{version}" for version in forgetting["versions"]],
        title="Accuracy of each task over the versions",
    )
    key = "".join(
        f'<li><i class="s{index % SERIES}"></i>{escape(task["name"])}</li>'
        for index, task in enumerate(tasks)
    )
    return _section(
        "Tasks and forgetting",
        "The same images through every version of the lineage, among all classes that the version "
        "knew: later versions have more answers to choose from.",
        f'{plot}<ul class="key">{key}</ul>'
        + _table(("task", "classes", "when learnt", "now", "points forgotten"), rows),
    )


def _classes(report: dict[str, Any]) -> str:
    rows = [
        (
            escape(one["name"]),
            escape(one["task"]),
            str(one["images"]),
            _bar(one["accuracy"]),
            percent(one["accuracy"]),
            percent(one["precision"]),
        )
        for one in report["classes"]
    ]
    retired = ", ".join(map(escape, report["retired"]))
    return _section(
        "Classes",
        "Right: the share of a class's images that were answered with the class. Precision: the "
        "share of a class's answers that were right."
        + (f" Retired, and never answered: {retired}." if retired else ""),
        _table(("class", "task", "images", "", "right", "precision"), rows),
    )


def _confusion(confusion: dict[str, Any]) -> str:
    rows = [
        (escape(one["is"]), escape(one["taken_for"]), str(one["images"]))
        for one in confusion["most_frequent"]
    ]
    beside = "side" if len(confusion["classes"]) <= SIDE_BY_SIDE else ""
    plot = matrix(confusion["counts"], names=confusion["classes"], title="Confusion matrix")
    table = _table(("is", "taken for", "images"), rows) if rows else "<p>Nothing is confused.</p>"
    return _section(
        "Confusion",
        "Rows are the classes of the images, columns the answers.",
        f'<div class="{beside}">{plot}<div>{table}</div></div>',
    )


def _calibration(calibration: dict[str, Any]) -> str:
    facts = [
        ("temperature", f"{calibration['temperature']:.3g}"),
        ("calibration error", _decimal(calibration["error"])),
        ("without temperature", _decimal(calibration["error_without"])),
    ]
    facts += [
        (f"recorded: {name.replace('_', ' ')}", f"{value:.3f}")
        for name, value in calibration["recorded"].items()
        if isinstance(value, float) and name != "temperature"
    ]
    plot = reliability(calibration["bins"], title="Accuracy over confidence")
    table = _table(("", ""), [(escape(name), value) for name, value in facts])
    return _section(
        "Calibration",
        "Shows how often answers of a confidence are right. On the dashed line the two agree; "
        "below it answers are too sure. Large dots stand for many images.",
        f'<div class="side">{plot}<div>{table}</div></div>',
    )


def _levels(levels: dict[str, Any]) -> str:
    facts = [
        ("answered by a group", percent(levels["answered_by_groups"])),
        ("right of these", percent(levels["right_of_these"])),
        ("right at any level", percent(levels["right_at_any_level"])),
    ]
    return _section(
        "Groups",
        "Where every class is in doubt and a group of classes is not, the group is the answer.",
        _table(("", ""), facts),
    )


def _advice(advice: dict[str, Any]) -> str:
    rows = [
        (escape(one["class"]), str(one["images"]), percent(one["accuracy"]), *_forecast(one))
        for one in advice["classes"]
    ]
    told = "".join(f"<li>{escape(line['text'])}</li>" for line in advice["lines"])
    titles = ("class", "images", "right", "more images", "points")
    return _section(
        "What would help most",
        "By the images of the run, left out in turn: a classifier on the same tokens learnt from a "
        "quarter, half and all images of a class.",
        f"<ul>{told}</ul>" + (_table(titles, rows) if rows else ""),
    )


def _forecast(one: dict[str, Any]) -> tuple[str, str]:
    return ("-", "-") if one["gain"] is None else (str(one["more"]), f"+ {100 * one['gain']:.1f}")


def _growth(growth: Sequence[dict[str, Any]]) -> str:
    mib = 1 << 20
    plot = stacked(
        [
            (
                f"v{one['version']}",
                (one["total_bytes"] - one["delta_bytes"]) / mib,
                one["delta_bytes"] / mib,
            )
            for one in growth
        ],
        unit="MiB",
        title="Size of each version",
    )
    rows = [
        (
            str(one["version"]),
            escape(one["change"]),
            str(one["classes"]),
            f"{one['parameters'] / 1e6:.2f} M",
            size(one["total_bytes"]),
            size(one["delta_bytes"]),
            size(one["memory_bytes"]),
            percent(one["accuracy"]),
        )
        for one in growth
    ]
    titles = ("version", "what", "classes", "parameters", "size", "new", "images", "accuracy then")
    return _section(
        "Growth",
        "MiB of weights a version: those shared with the version before, and new ones on top.",
        plot + _table(titles, rows),
    )


def _section(title: str, says: str, content: str) -> str:
    return f"<section><h2>{title}</h2><p>{says}</p>{content}</section>"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table of cells that are HTML already."""
    kinds = [
        ' class="name"' if index == 0 or title in TEXT_COLUMNS else ""
        for index, title in enumerate(titles)
    ]
    head = "".join(f"<th{kind}>{one}</th>" for kind, one in zip(kinds, titles, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _bar(share: float | None) -> str:
    return "" if share is None else f'<span class="bar"><i style="width:{share:.1%}"></i></span>'


def _hundredths(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
