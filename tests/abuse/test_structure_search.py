"""Random structures of all formats, guided by processor time: what is the worst for a thread?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.abuse.random_structures import BUILDERS, Draws
from tests.abuse.structure_search import NUMBERS, search
from tests.campaigns import AddRow

SECONDS = float(os.environ.get("SEARCH_SECONDS", "120"))
SEED = int(os.environ.get("SEARCH_SEED", "1"))
MOST_CPU_S = 0.25
"""Two threads then answer eight of the worst images a second, and a request waits for one of them
at most a fortieth of the ten seconds that it may. A usual one of a million pixels takes 0.06 s."""
MOST_OUTLINE_S = 0.05


def searched(*, seconds: float, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.abuse.structure_search", str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    tallies: dict[str, Any] = json.loads(done.stdout)
    return tallies


def test_numbers_make_an_image_of_every_format() -> None:
    for kind, build in BUILDERS.items():
        images = [
            build(Draws([seed * 7919 + place for place in range(NUMBERS)])) for seed in (1, 2)
        ]
        assert len(set(images)) == 2, kind


def test_a_search_finds_images_that_threads_take() -> None:
    tally = search("GIF", seconds=60, seed=1, most=10)
    assert tally.tried == 10
    assert tally.in_threads > 0
    assert tally.slowest.cpu_s > 0


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 120)
def test_no_structure_makes_a_thread_work_long(abuse_row: AddRow) -> None:
    tallies = searched(seconds=SECONDS, seed=SEED)
    assert tallies.keys() == BUILDERS.keys()
    for kind, tally in tallies.items():
        slowest, a_byte = tally["slowest"], tally["slowest_a_byte"]
        assert slowest["cpu_s"] < MOST_CPU_S, (kind, slowest)
        assert tally["slowest_outline_s"] < MOST_OUTLINE_S, (kind, tally)
        result = "none in a thread"
        if tally["in_threads"]:
            each_us = 1e6 * a_byte["cpu_s"] / a_byte["size_bytes"]
            result = (
                f"{tally['in_threads']:,} in threads: slowest {1000 * slowest['cpu_s']:.0f} ms of "
                f"{slowest['size_bytes']:,} bytes; most a byte {each_us:.1f} µs "
                f"({1000 * a_byte['cpu_s']:.0f} ms of {a_byte['size_bytes']:,})"
            )
        outline_ms = 1000 * tally["slowest_outline_s"]
        how = f"{tally['tried']:,} structures, outline at most {outline_ms:.1f} ms"
        abuse_row(f"structure search, {kind}", how, result)
    assert tallies["TIFF"]["in_threads"] == 0
