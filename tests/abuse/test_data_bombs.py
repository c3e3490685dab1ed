"""Data that unpacks to gigabytes, in a process whose memory and disk are measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns import AddRow
from tests.trainer.data.sources.bomb_reader import read_in_child
from tests.trainer.data.sources.bombs import BOMBS
from trainer.data.sources import limits

TOTAL_BYTES = 5 << 29
MOST_GROWN = limits.MAX_MEMORY
LARGER_TARS = {"tar of folders", "tar of links", "tar of empty files"}
"""A fifth of TOTAL_BYTES is half a million members, which take ten seconds to list."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_data_bombs_campaign(tmp_path: Path, abuse_row: AddRow) -> None:
    pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    readings = {}
    for name, make in BOMBS.items():
        folder = tmp_path / name
        folder.mkdir()
        bomb = make(folder, TOTAL_BYTES // 5 if name in LARGER_TARS else TOTAL_BYTES)
        readings[name] = found = read_in_child(bomb)
        bomb.unlink()
        assert found.error, name
        assert "cannot be unpacked" not in found.error, name  # which a full disk says
        assert found.grown_bytes < MOST_GROWN, (name, found)
    most = max(readings, key=lambda name: readings[name].grown_bytes)
    slowest = max(readings, key=lambda name: readings[name].seconds)
    abuse_row(
        "data bombs",
        f"{len(BOMBS)} files of every form of data, each made to take {TOTAL_BYTES >> 20} MiB",
        f"all refused in a sentence; memory at most +{readings[most].grown_bytes >> 20} MiB "
        f"({most}), disk at most 256 MiB or 200 times the file, slowest "
        f"{readings[slowest].seconds:.0f} s ({slowest})",
    )
