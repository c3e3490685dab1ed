from __future__ import annotations

import re

import pytest

from model_store.tables import columns, counted, csv_cell, figure, percent, printable, size
from tests.packaging.project import ROOT


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_a_size_has_the_unit_that_fits_it(count: int, text: str) -> None:
    assert size(count) == text


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert columns([("a", "b"), ("long", "c")]) == "a     b\nlong  c"


def test_text_of_unknown_origin_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in printable("\x1b[2J")
    assert "\x1b" not in columns([("\x1b[2J",)])


def test_a_share_that_is_not_known_is_a_dash() -> None:
    assert percent(None) == "-"
    assert percent(0.123) == "12.3 %"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "-"),
        (0.0, "0.0 %"),
        (1.0, "100.0 %"),
        (0.935, "93.5 %"),
        (13 / 16, "81.3 %"),  # a half: browsers round it up, and so does this
        (1999 / 2000, "99.9 %"),
        (1 / 100_000, "0.1 %"),
    ],
)
def test_percentages_have_one_form(share: float | None, text: str) -> None:
    assert percent(share) == text


def test_a_noun_agrees_with_its_number() -> None:
    assert [counted(count, "task") for count in (0, 1, 2)] == ["0 tasks", "1 task", "2 tasks"]
    assert counted(1, "class", "classes") == "1 class"
    assert counted(3, "class", "classes") == "3 classes"


def test_no_other_place_writes_percentages_by_hand() -> None:
    by_hand = re.compile(r":\.\df\} ?%|(?<!width:\{share):\.\d%\}")  # a width in CSS is none
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in ("trainer", "model_store")
        for path in sorted((ROOT / package).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if by_hand.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@A1", "\t=1", "\r", "\n=1", "  =1", "\uff1d1"]
)
def test_no_cell_of_csv_is_a_formula(text: str) -> None:
    assert csv_cell(text).startswith("'")
    assert csv_cell(text).isprintable()


def test_other_cells_of_csv_stay_as_they_are() -> None:
    for text in ("", "cat", "a=b", "1-2", "'"):
        assert csv_cell(text) == text


def test_bidirectional_overrides_do_not_turn_a_line_round() -> None:
    assert printable("a\u202eb\u2066c\u200fd") == "a\ufffdb\ufffdc\ufffdd"


@pytest.mark.parametrize(
    ("value", "digits", "told"),
    [
        (190.4, 2, "190"),
        (3.07e-06, 3, "under 0.001"),
        (0.0, 3, "0"),
        (11.24, 3, "11.2"),
        (4.0, 3, "4"),
        (0.0306, 2, "0.031"),
        (123456.0, 3, "123000"),
        (99.96, 3, "100"),
    ],
)
def test_a_figure_has_no_exponent(value: float, digits: int, told: str) -> None:
    assert figure(value, digits=digits) == told
