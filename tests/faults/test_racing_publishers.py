"""Many processes publish to one directory at once: nobody's version is lost or overwritten."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.model_store.drafts import publish_lineage

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


def _race(location: Path, *, processes: int, publishes: int) -> Store:
    """A store after the race, in which everything that anybody was told is true."""
    store = Store.create(str(location))
    publish_lineage(store, 1)
    command = [sys.executable, "-m", "tests.faults.racing_promoter", store.location]
    with ExitStack() as stack:
        racers = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(publishes), str(seed)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for seed in range(1, processes + 1)
        ]
        for racer in racers:
            stack.callback(racer.kill)
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        said = _run_all(racers)
    _check_nothing_lost(store, said, count=processes * publishes)
    return store


def _run_all(racers: list[subprocess.Popen[str]]) -> list[dict[str, dict[str, int | str]]]:
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    answers = []
    for racer in racers:
        output, _ = racer.communicate(timeout=600)
        assert racer.returncode == 0
        answers.append(json.loads(output))
    return answers


def _check_nothing_lost(
    store: Store, said: list[dict[str, dict[str, int | str]]], *, count: int
) -> None:
    told = {int(version): one for answer in said for version, one in answer["versions"].items()}
    assert sorted(told) == list(range(2, count + 2)), "a number was given to two publishers"
    assert store.versions() == list(range(1, count + 2))
    assert {version: store.manifest(version).transaction for version in told} == told
    records = {int(number): to for answer in said for number, to in answer["records"].items()}
    assert sorted(records) == list(range(1, count + 1)), "a record was written by two publishers"
    assert {one.number: one.target for one in store.history("race")} == records
    report = store.verify()
    assert report.problems == ()
    assert report.unused == ()
    assert report.versions == count + 1


def test_processes_that_publish_at_once_all_keep_their_versions(memory_path: Path) -> None:
    _race(memory_path / "models", processes=4, publishes=5)


@pytest.mark.slow
def test_campaign_eight_processes_publish_25_versions_each(
    tmp_path: Path, fault_row: AddRow
) -> None:
    store = _race(tmp_path / "models", processes=8, publishes=25)
    fault_row(
        "8 processes × 25 publishes, directory",
        "8 processes, each publishing and promoting; on the disk of the tests",
        f"{len(store.versions()) - 1} versions, contiguous, none lost; "
        f"{len(store.history('race'))} channel records, contiguous, none lost",
    )
