"""Docstrings begin with a verb and its object, or name the thing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.packaging.import_graph import PACKAGES, modules
from tests.packaging.project import ROOT

QUESTION = re.compile(r"\s*(What|Who|Where|Whoever|Whatever|How|Which)\b")


def docstrings(source: str) -> Iterator[str]:
    """Find the docstrings of modules, classes and functions, and strings that describe a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(value := node.value, ast.Constant):
            yield from [value.value] if isinstance(value.value, str) else []


def test_no_docstring_begins_with_a_question_word() -> None:
    paths = [path for package in PACKAGES for path in modules(package).values()]
    assert [f"{_place(path)}: {text[:60]}" for path in paths for text in _questions(path)] == []


def test_a_question_word_is_noticed() -> None:
    source = (
        '"""What it is."""\nLIMIT = 3\n"""Which limit."""\n\ndef read() -> None:\n    """Read."""\n'
    )
    found = [text for text in docstrings(source) if QUESTION.match(text)]
    assert found == ["What it is.", "Which limit."]


def _questions(path: Path) -> Iterator[str]:
    return (text for text in docstrings(path.read_text()) if QUESTION.match(text))


def _place(path: Path) -> str:
    return str(path.relative_to(ROOT))
