"""Looking whether a store can be made, by several processes at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model_store.errors import DneError
from model_store.store.store import check_location

LOOKS, AT_ONCE = 200, 8


@pytest.mark.parametrize("below", ["models", "not/there/yet"])
def test_looks_at_one_location_do_not_disturb_each_other_and_leave_nothing(
    tmp_path: Path, below: str
) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda _: check_location(str(tmp_path / below)), range(LOOKS)))
    assert list(tmp_path.iterdir()) == []


def test_a_look_at_an_empty_folder_leaves_it_empty(tmp_path: Path) -> None:
    check_location(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_location_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DneError, match="Not a directory"):
        check_location(str(tmp_path / "file" / "models"))
