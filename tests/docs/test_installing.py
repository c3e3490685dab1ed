"""Documents tell how to install what no package index has yet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.packaging.project import ROOT

FROM_AN_INDEX = re.compile(r"pip install (?:--\S+ )*[\"'\\]*dne-serve(?!\[)")
FIRST_STEPS = ["README.md", "docs/guides/first-steps.md", "docs/client.md"]
PAGES = [
    *(page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "docs").rglob("*.ipynb"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_installs_from_an_index_only_after_the_first_release(page: Path) -> None:
    """Extras are added to an environment that has the package: pip then asks no index for it."""
    for line in page.read_text().splitlines():
        if FROM_AN_INDEX.search(line):
            assert "from the first release on" in line


@pytest.mark.parametrize("name", FIRST_STEPS)
def test_a_page_of_first_steps_installs_from_a_clone(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "No package index has dne-serve yet" in text
    assert 'pip install ".[' in text or "pip install dist/dne_serve-*.whl" in text
