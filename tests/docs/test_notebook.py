"""The notebook is one that Jupyter opens, and its cells run in order: no Jupyter is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.project import ROOT

NOTEBOOK = ROOT / "docs/notebooks/first_steps.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return found


def code_cells() -> list[str]:
    return ["".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"]


def test_the_notebook_has_the_form_of_notebooks_and_no_outputs() -> None:
    whole = json.loads(NOTEBOOK.read_text())
    assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in cells()]
    assert len(set(ids)) == len(ids) > 5
    assert [
        cell["id"] for cell in cells() if cell.get("outputs") or cell.get("execution_count")
    ] == []


def test_every_cell_of_the_notebook_is_plain_python() -> None:
    for number, source in enumerate(code_cells()):
        compile(source, f"cell {number}", "exec")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_notebook_runs_from_the_first_cell_to_the_last(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "DNE_BACKEND": "torch",  # a busy machine would measure engines for long
    }
    done = subprocess.run(
        [sys.executable, "-c", "\n\n".join(code_cells())],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "version 2 is right in" in done.stdout
    assert "trying it" in done.stdout  # the history has the reason of the rollback
