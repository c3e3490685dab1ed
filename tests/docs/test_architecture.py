"""The arrows that docs/architecture.md draws are the imports of the source."""

from __future__ import annotations

import re

import pytest

from tests.packaging.import_graph import PACKAGES, import_graph, modules_by_folder
from tests.packaging.project import ROOT

WITH_ROOMS = [one for one in PACKAGES if len(modules_by_folder(one)) > 1]


def drawn(package: str) -> dict[str, int]:
    """Map each room of a package to the line that it stands on; the top line is 0."""
    arrows = (ROOT / "docs/architecture.md").read_text().partition("## Arrows")[2]
    block = re.search(rf"^{package}: (.*?)^(?:```|$)", arrows, re.MULTILINE | re.DOTALL)
    assert block is not None, f"docs/architecture.md draws no arrows of {package}"
    lines = enumerate(block[1].strip().splitlines())
    return {room: line for line, rooms in lines for room in rooms.split()}


def test_every_room_is_drawn() -> None:
    for package in WITH_ROOMS:
        found = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
        assert set(drawn(package)) == found


@pytest.mark.parametrize("package", WITH_ROOMS)
def test_no_room_imports_one_that_is_drawn_above_it(package: str) -> None:
    line = drawn(package)
    upward = [
        f"{module} imports {imported}"
        for module, all_imported in import_graph(package).items()
        for imported in all_imported
        if (room := module.split(".")[1:2]) and (other := imported.split(".")[1:2])
        if line.get(other[0], -1) < line.get(room[0], -1) and other[0] in line
    ]
    assert upward == []
