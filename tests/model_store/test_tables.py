from __future__ import annotations

import pytest

from model_store.tables import columns, percent, printable, size


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
