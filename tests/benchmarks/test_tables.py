"""What the README says about other servers is what was measured."""

from __future__ import annotations

import json

from benchmarks.serving.tables import RESULTS, comparison
from tests.packaging.project import ROOT


def test_the_comparison_in_the_readme_is_made_from_the_result() -> None:
    result = json.loads((RESULTS / "serving.json").read_text())
    assert comparison(result) in (ROOT / "README.md").read_text()
