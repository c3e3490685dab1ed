"""The files that `make docs` writes are what the code says."""

from __future__ import annotations

import re
from types import ModuleType
from xml.etree import ElementTree

import pytest

from docs import configuration, drawing, network_drawing
from tests.packaging.project import sources

STALE = "run `make docs`"


def test_the_configuration_is_that_of_the_code() -> None:
    assert configuration.PAGE.read_text() == configuration.page(), STALE


def test_every_variable_of_the_code_stands_in_the_configuration() -> None:
    names = {name for path in sources() for name in re.findall(r"DNE_[A-Z_]+", path.read_text())}
    page = configuration.page()
    assert sorted(name for name in names if f"`{name}`" not in page) == []
    assert "DNE_STORE" in names


@pytest.mark.parametrize("script", [drawing, network_drawing], ids=lambda one: one.FILE.name)
def test_a_drawing_is_that_of_its_script(script: ModuleType) -> None:
    made = script.svg()
    assert script.FILE.read_text() == made, STALE
    assert ElementTree.fromstring(made).tag.endswith("svg")
