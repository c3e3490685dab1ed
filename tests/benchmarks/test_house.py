"""The code base has one class of a name, or a reason for the second one."""

from __future__ import annotations

import ast

from benchmarks.house import PACKAGES, TWICE, classes_used_twice
from tests.packaging.project import ROOT


def test_every_class_name_that_is_used_twice_has_a_reason() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert classes_used_twice([ast.parse(path.read_text()) for path in files]) == sorted(TWICE)
