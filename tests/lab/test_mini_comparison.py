"""All methods run through a whole comparison, and the report has a row of each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab import cli, results
from lab.plan import CONVERGED
from lab.registry import METHODS
from lab.report.metrics import courses_of, rows_of
from lab.report.page import markdown_table
from lab.report.tables import Tables
from tests.lab.synthetic import write_zip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def data(folder: Path) -> Path:
    """Return the file that LAB_DATA names, or make one: CIFAR-100 is not part of a clone."""
    given = os.environ.get("LAB_DATA")
    return Path(given) if given else write_zip(folder / "data.zip", size=32)


def test_every_method_learns_all_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path))
    out, page = tmp_path / "mini.jsonl", tmp_path / "page.md"
    given = ["--data", str(data(tmp_path)), "--preset", "mini", "--out", str(out)]
    methods = [name for name in METHODS if name != "adapter"]  # it needs pre-trained weights
    assert cli.main(["compare", *methods, *given]) == 0
    lines = results.read([out], note=print)
    rows = rows_of(courses_of(lines))
    assert [row.method for row in rows] == methods
    assert cli.main(["report", "--results", str(out), "--out", str(page)]) == 0
    with capsys.disabled():
        print("\n" + markdown_table(Tables(rows=rows, plan=CONVERGED).matched_cost()))
