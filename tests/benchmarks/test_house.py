"""The code base has one class of a name, or a reason for the second one, and does not sprawl."""

from __future__ import annotations

import ast

from benchmarks.house import PACKAGES, TWICE, classes_used_twice, tracked, words_of_documents
from tests.packaging.project import ROOT


def test_every_class_name_that_is_used_twice_has_a_reason() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert classes_used_twice([ast.parse(path.read_text()) for path in files]) == sorted(TWICE)


def test_modules_and_words_stay_few() -> None:
    assert len(tracked(*(f"{package}/*.py" for package in PACKAGES))) <= 300
    assert words_of_documents() <= 45_000
