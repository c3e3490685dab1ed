"""Read which module imports which, from the source: `python -m tests.packaging.import_graph`.

Imports for type checking alone are left out; imports inside functions count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.packaging.project import ROOT

PACKAGES = ("model_store", "trainer", "dne_serve", "dne_client")
Graph = Mapping[str, frozenset[str]]


def modules(package: str) -> dict[str, Path]:
    """List the modules of a package by their dotted names."""
    return {_dotted(path): path for path in sorted((ROOT / package).rglob("*.py"))}


def import_graph(package: str) -> Graph:
    """Map each module of a package to the modules of the same package that it imports."""
    known = modules(package)
    return {name: _imported(path, known) - {name} for name, path in known.items()}


def longest_chain(graph: Graph) -> list[str]:
    """Return the longest chain of imports, beginning with the module that nothing imports."""
    longest: dict[str, list[str]] = {}

    def chain(name: str, above: frozenset[str]) -> list[str]:
        if name not in longest:
            below = (chain(one, above | {name}) for one in graph[name] - above)
            longest[name] = [name, *max(below, key=len, default=[])]
        return longest[name]

    return max((chain(name, frozenset()) for name in graph), key=len)


def cycles(graph: Graph) -> list[list[str]]:
    """Return groups of modules that import each other, directly or through others."""
    reach = {name: _reached(graph, name) for name in graph}
    groups = {frozenset({name, *(to for to in reach[name] if name in reach[to])}) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def modules_by_folder(package: str) -> dict[str, int]:
    """Count the modules of each folder, without its `__init__`."""
    folders = [path.parent for path in modules(package).values() if path.name != "__init__.py"]
    return {str(one.relative_to(ROOT)): folders.count(one) for one in sorted(set(folders))}


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path, known: Mapping[str, Path]) -> frozenset[str]:
    wanted = _names(ast.parse(path.read_text()))
    return frozenset(name for pair in wanted if (name := _module(*pair, known)))


def _module(package: str, name: str, known: Mapping[str, Path]) -> str | None:
    """Return the module that `from package import name` is about, if it is one of those known."""
    inner = f"{package}.{name}"
    return inner if inner in known else package if package in known else None


def _names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        else:
            yield from _names(node)


def _reached(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def main() -> None:
    for package in PACKAGES:
        graph = import_graph(package)
        chain = longest_chain(graph)
        lines = sum(len(path.read_text().splitlines()) for path in modules(package).values())
        print(f"{package}: {len(graph)} modules, {lines} lines")
        print(f"  modules a folder: {modules_by_folder(package)}")
        print(f"  cycles: {cycles(graph) or 'none'}")
        print(f"  import depth {len(chain) - 1}: {' > '.join(chain)}")


if __name__ == "__main__":
    main()
