"""Write the report of a version: its figures as JSON, and one HTML file with the facts inside.

The HTML file is the server's page with facts, pictures, script and style inside. The files of the
page are read; nothing of the server is imported. The written file needs no network: its policy
allows the script and the style inside, by their digests, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from model_store.errors import ImageRejected, StoreError, WriteFailed
from model_store.records.describe import verdict
from model_store.records.manifest import Manifest
from model_store.report.advice import described, read_advice
from model_store.report.ancestry import Ancestor, Ancestry, AncestryCache
from model_store.report.facts import (
    Evidence,
    average_forgetting,
    classes_of,
    confused_in,
    make_report,
    matrix_of,
    read_picture_of,
    tasks_of,
)
from model_store.report.record import Measured, ReportClass, ReportTask, VersionReport
from model_store.store.store import Store
from model_store.tables import likely_range
from trainer.evaluation.evaluate import measure_levels
from trainer.progress import Progress
from trainer.report.measure import MeasuredAnew, measure
from trainer.request import Report

FILES = resources.files("dne_serve") / "console"
_STYLES = ("style.css", "report.css")
SCRIPTS = (
    "ask.js",
    "elements.js",
    "plots.js",
    "report_pictures.js",
    "report_parts.js",
    "report.js",
)
"""One after the other they are one script: each stands below those that it imports."""
_ONLY_SERVED = re.compile(r"<!-- only served -->.*?<!-- / -->\n", re.DOTALL)
_IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def page(facts: dict[str, Any]) -> str:
    """Write the page. A name may be any text: none of it is ever markup."""
    style = "".join(_read(name) for name in _STYLES)
    script = "".join(_EXPORT.sub("", _IMPORT.sub("", _read(name))) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    data = json.dumps(facts, allow_nan=False).replace("<", "\\u003c")
    tail = (
        f'<script id="facts" type="application/json">{data}</script>\n'
        f'<script type="module">{script}</script>\n'
    )
    html = _ONLY_SERVED.sub("", _read("report.html"))
    html = html.replace("<title>", f"{head}<title>", 1)
    html = html.replace("</head>", f"<style>{style}</style>\n</head>", 1)
    return html.replace("</body>", f"{tail}</body>", 1)


def _facts_of_page(
    store: Store, manifest: Manifest, report: VersionReport, **more: Any
) -> dict[str, Any]:
    """Put pictures and further facts beside those that a server tells."""
    facts = report.model_dump(mode="json", by_alias=True)
    for picture in facts["pictures"]:
        picture["src"] = _picture(store, manifest, picture["number"])
    return {**facts, **more}


def _picture(store: Store, manifest: Manifest, number: int) -> str | None:
    try:
        thumbnail, _ = read_picture_of(store, manifest, number)
    except (StoreError, ImageRejected):
        return None
    return f"data:{thumbnail.type};base64,{base64.b64encode(thumbnail.data).decode()}"


def _read(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


_CONFUSIONS_NAMED = 20


def write_report(request: Report, *, progress: Progress) -> tuple[dict[str, Any], list[Path]]:
    """Write `report.html` and `report.json`. Return the figures and the two paths."""
    store = Store.open(request.store)
    figures, facts = measure_report(
        store, store.manifest(request.version), device=request.device, progress=progress
    )
    written = {
        "report.json": json.dumps(figures, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "report.html": page(facts),
    }
    paths = [request.out / name for name in written]
    try:
        request.out.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, written.values(), strict=True):
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise WriteFailed(f"cannot write to {request.out}: {error.strerror}") from error
    return figures, paths


def measure_report(
    store: Store, manifest: Manifest, *, device: str, progress: Progress
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure a version. Return the figures for programs, and the facts of the page."""
    ancestry = AncestryCache().of(store, manifest)
    measured = measure(store, manifest, ancestry=ancestry, device=device, progress=progress)
    report = make_report(store, manifest, ancestry=ancestry, evidence=measured.evidence)
    more = {
        "advice": described(read_advice(store, manifest)),
        "proposal": report.proposal,
        "levels": measured.judged
        and measure_levels(
            measured.judged, manifest.hierarchy, temperature=manifest.calibration.temperature
        ),
    }
    facts = _facts_of_page(
        store, manifest, report, measured_anew=measured.judged is not None, **more
    )
    return {**_figures(manifest, ancestry, measured), **more}, facts


def _figures(manifest: Manifest, ancestry: Ancestry, measured: MeasuredAnew) -> dict[str, Any]:
    answers = measured.evidence
    source = "held-out" if measured.judged else "recorded" if answers.confusion else "none"
    return {
        "version": manifest.version,
        "parent": manifest.parent,
        "created": manifest.created,
        "digest": manifest.digest,
        "images": answers.images,
        "source": source,
        "verdict": verdict(manifest),
        "notes": list(measured.missing),
        "accuracy": {
            "all": _share(answers.accuracy.all),
            "old": _share(answers.accuracy.old),
            "new": _share(answers.accuracy.new),
            "interval": _interval(answers.accuracy.all),
        },
        "recorded": manifest.metrics.model_dump(mode="json"),
        "classes": [_class(row) for row in classes_of(manifest, answers)],
        "retired": list(manifest.retired),
        "confusion": {
            "classes": list(manifest.classes),
            "counts": matrix_of(manifest.classes, answers.confusion),
            "most_frequent": [
                {"is": pair.label, "taken_for": pair.taken_for, "images": pair.images}
                for pair in confused_in(answers.confusion)[:_CONFUSIONS_NAMED]
            ],
        },
        "forgetting": _forgetting(tasks_of(manifest, answers.tasks), ancestry),
        "calibration": _calibration(manifest, answers),
        "growth": [_growth(ancestor) for ancestor in ancestry.ancestors],
    }


def _class(row: ReportClass) -> dict[str, Any]:
    return {
        "name": row.label,
        "task": row.task,
        "images": row.right.images or 0 if row.right else 0,
        "accuracy": _share(row.right),
        "precision": _share(row.precision),
    }


def _forgetting(tasks: list[ReportTask], ancestry: Ancestry) -> dict[str, Any]:
    return {
        "versions": [ancestor.grown.version for ancestor in ancestry.ancestors],
        "tasks": [
            {
                "name": task.name,
                "classes": task.classes,
                "accuracy": task.accuracy,
                "learnt": _share(task.learnt),
                "now": _share(task.now),
                "forgetting": task.forgotten,
            }
            for task in tasks
        ],
        "average": average_forgetting(tasks),
    }


def _calibration(manifest: Manifest, answers: Evidence) -> dict[str, Any]:
    """Describe the calibration that was measured. `recorded` has the manifest's errors, which were
    measured on images that the temperature was not fitted to."""
    measured = answers.calibration
    return {
        "temperature": measured.temperature,
        "error": measured.after.all,
        "error_without": measured.before.all,
        "bins": [
            {
                "from": counted.low,
                "to": counted.high,
                "images": counted.images,
                "confidence": counted.confidence,
                "accuracy": counted.right / counted.images,
            }
            for counted in measured.bins
        ],
        "recorded": manifest.calibration.model_dump(mode="json"),
    }


def _growth(ancestor: Ancestor) -> dict[str, Any]:
    grown = ancestor.grown.model_dump(exclude={"gflop"})
    return {**grown, "parent": ancestor.parent, "accuracy": _share(ancestor.grown.accuracy)}


def _share(measured: Measured | None) -> float | None:
    return measured.share if measured else None


def _interval(measured: Measured | None) -> list[float] | None:
    """Compute the 95 % interval of the accuracy."""
    if measured is None or not measured.images:
        return None
    return list(likely_range(measured.share, measured.images))
