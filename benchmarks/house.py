"""Count the code base: lines, modules, public names, words, settings, targets and repeated names.

`python -m benchmarks.house` prints the table. It reads the files of git, and runs nothing.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("model_store", "trainer", "dne_serve", "dne_client")
RECORDS = ("docs/adr/", "docs/notebook/")
"""Markdown that is not counted as documentation: decisions and notes of trials."""


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def public_names(tree: ast.Module) -> Iterator[str]:
    """Yield functions, classes, methods, constants and fields whose names have no underscore."""
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    scopes += (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for scope in scopes:
        for node in scope.body:
            for name in _bound_by(node):
                if not name.startswith("_"):
                    yield name


def _bound_by(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def classes_used_twice(trees: list[ast.Module]) -> list[str]:
    names = Counter(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1 and not name.startswith("_"))


def words_of_documents() -> int:
    pages = [
        path for path in tracked("*.md") if not str(path.relative_to(ROOT)).startswith(RECORDS)
    ]
    return sum(len(path.read_text().split()) for path in pages)


def settings_of_the_server() -> int:
    tree = ast.parse((ROOT / "dne_serve/settings.py").read_text())
    (found,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings"
    )
    return sum(
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
        for node in found.body
    )


def targets_of_make() -> int:
    text = (ROOT / "Makefile").read_text()
    return len(set(re.findall(r"^([a-z][a-z-]*):.*##", text, re.MULTILINE)))


def main() -> None:
    code = [path for path in tracked(*(f"{one}/*.py" for one in PACKAGES)) if path.exists()]
    trees = [ast.parse(path.read_text()) for path in code]
    lines = lines_of(code)
    names = sum(1 for tree in trees for _ in public_names(tree))
    twice = classes_used_twice(trees)
    rows = {
        f"lines of {', '.join(PACKAGES)}": lines,
        "modules of the four": len(code),
        "public names per 1,000 lines": round(1000 * names / lines, 1),
        "lines of tests": lines_of(tracked("tests/*.py")),
        "words of Markdown without decision records and notebook": words_of_documents(),
        "settings of the server": settings_of_the_server(),
        "targets of make with help": targets_of_make(),
        f"class names used twice ({', '.join(twice)})": len(twice),
    }
    for what, count in rows.items():
        print(f"{count:>8,} {what}")


if __name__ == "__main__":
    main()
