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
TWICE = {
    "Answer": "the client's answer to a request, and the engine's answer to a ticket",
    "Outcome": "the client's outcome for one of many images, and the trainer's for one run",
    "Prediction": "the client reads what the schema of the server writes",
    "Refused": "the client raises what the server answers",
    "Score": "the client reads what the schema of the server writes",
    "TooLarge": "the client raises what the server answers",
}
"""Class names that two packages use, and why. The client imports none of the other packages."""


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


def public_names(trees: list[ast.Module]) -> Counter[str]:
    """Count names without a leading underscore: `definitions`, `constants` and `fields`.

    Definitions are functions, classes and methods. Constants are the other names of a module, and
    fields the other names of a class: of a dataclass, a record or an enumeration.
    """
    counts: Counter[str] = Counter()
    for tree in trees:
        for scope in ast.walk(tree):
            if isinstance(scope, ast.Module | ast.ClassDef):
                bound = "constants" if isinstance(scope, ast.Module) else "fields"
                counts.update(_kinds_in(scope.body, bound=bound))
    return counts


def _kinds_in(body: list[ast.stmt], *, bound: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names, kind = [node.name], "definitions"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names, kind = [target.id for target in targets if isinstance(target, ast.Name)], bound
        else:
            continue
        yield from (kind for name in names if not name.startswith("_"))


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
    (settings,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings"
    )
    return sum(
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
        for node in settings.body
    )


def targets_of_make() -> int:
    text = (ROOT / "Makefile").read_text()
    return len(set(re.findall(r"^([a-z][a-z-]*):.*##", text, re.MULTILINE)))


def main() -> None:
    code = [path for path in tracked(*(f"{package}/*.py" for package in PACKAGES)) if path.exists()]
    trees = [ast.parse(path.read_text()) for path in code]
    lines = lines_of(code)
    names = public_names(trees)

    def per_thousand(count: int) -> float:
        return round(1000 * count / lines, 1)

    twice = classes_used_twice(trees)
    rows = {
        f"lines of {', '.join(PACKAGES)}": lines,
        "modules of the four": len(code),
        "public names per 1,000 lines": per_thousand(names["definitions"] + names["constants"]),
        "of these: functions, classes and methods": per_thousand(names["definitions"]),
        "public names with the fields of classes": per_thousand(names.total()),
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
