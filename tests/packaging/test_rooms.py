"""The packages have rooms that one can find one's way in."""

from __future__ import annotations

import ast

import pytest

from tests.packaging.import_graph import (
    PACKAGES,
    cycles,
    import_graph,
    modules,
    modules_by_folder,
)
from tests.packaging.project import ROOT

MOST_MODULES = 12


@pytest.mark.parametrize("package", PACKAGES)
def test_no_room_is_crowded(package: str) -> None:
    crowded = {name: n for name, n in modules_by_folder(package).items() if n > MOST_MODULES}
    assert crowded == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other(package: str) -> None:
    assert cycles(import_graph(package)) == []


def test_every_room_says_what_it_is_for() -> None:
    inits = [path for one in PACKAGES for path in modules(one).values() if path.stem == "__init__"]
    silent = [path for path in inits if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_every_room_stands_in_the_architecture() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = {folder.rpartition("/")[2] for one in PACKAGES for folder in modules_by_folder(one)}
    assert sorted(name for name in rooms if f"{name}/ " not in text) == []


def test_a_cycle_is_noticed() -> None:
    graph = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"b"})}
    assert cycles(graph) == [["b", "c"]]
