"""A store that borrows, the store that lends, and what kills and power cuts leave of both."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_store.errors import StoreNotFound
from model_store.store.alternates import list_borrowers
from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.faults.disks import make_ext4, mounted
from tests.faults.test_power_cut import LAZY, WRITING, copy_of, publisher
from tests.faults.test_system_calls import attempts_at
from tests.model_store.drafts import prepare, publish_lineage

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]


def _check_both(lender: Path, *, alone: bool) -> bool:
    """Nothing of the borrower is missing, however far it came, and it can go on. Return whether
    its version was there. `alone`: nothing but the record of a store that is not there is left."""
    shared = Store.open(str(lender))
    assert shared.verify().problems == ()
    acme = f"{lender}-acme"
    published = False
    try:
        borrower = Store.open(acme)
    except StoreNotFound:
        states = [one.state for one in list_borrowers(shared.objects, location=str(lender))]
        assert set(states) <= {"gone"}
        assert alone
    else:
        published = borrower.versions() == [1]
        assert borrower.verify().problems == ()
    again = Store.create(acme, alternates=[str(lender)])
    made = prepare(task="again", images=1).publish(again)
    assert made.experts[0].bytes == len(again.read_shard(made.experts[0]))
    assert again.verify().problems == ()
    assert shared.verify().problems == ()
    return published


@pytest.mark.slow
def test_a_kill_before_any_system_call_of_a_borrower_or_its_lender_loses_nothing(
    memory_path: Path,
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults.killed_publisher", str(memory_path), "borrow"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    lenders = [path for path in memory_path.iterdir() if path.name.isdigit()]
    assert len(lenders) > 150
    published = [_check_both(path, alone=True) for path in lenders]
    assert 0 < sum(published) < len(published)


@pytest.mark.slow
def test_campaign_a_kill_before_every_system_call_of_a_borrower_and_its_lender(
    memory_path: Path, fault_row: AddRow
) -> None:
    attempts = attempts_at(memory_path / "kills", "borrow", "signal=KILL")
    published = 0
    for attempt in attempts:
        published += _check_both(Path(attempt["store"]), alone=not attempt["acknowledged"])
        shutil.rmtree(attempt["store"])
        shutil.rmtree(attempt["store"] + "-acme")
    assert 0 < published < len(attempts)
    fault_row(
        "kill -9 before every system call: a borrower is made and publishes, its lender deletes "
        "and sweeps",
        f"strace injection, {len(attempts)} calls",
        f"0 borrowed experts lost ({published} versions there), the next publish worked "
        f"{len(attempts)} times",
    )


def _cuts(folder: Path, *, options: str, calls: frozenset[str]) -> Iterator[Path]:
    """The disk of both stores after a power cut before each of the calls."""
    image, cut = folder / "disk.img", folder / "cut.img"
    make_ext4(image, mib=16)
    with mounted(folder / "disk", options=options, kind="ext4", source=image) as disk:
        publish_lineage(Store.create(str(disk / "models")), 1)
        with publisher(disk / "models", publishes="borrow") as running:
            assert running.stdin is not None
            assert running.stdout is not None
            for line in running.stdout:
                if line.strip() in calls:
                    copy_of(image, cut)
                    with mounted(folder / "cut", options="loop", kind="ext4", source=cut) as after:
                        yield after / "models"
                running.stdin.write("\n")
                running.stdin.flush()
            assert running.wait(30) == 0


@pytest.mark.slow
def test_campaign_a_power_cut_before_every_call_of_a_borrower_and_its_lender(
    memory_path: Path, fault_row: AddRow
) -> None:
    published: list[bool] = []
    for mode in ("ordered", "writeback"):
        folder = memory_path / mode
        folder.mkdir()
        for lender in _cuts(folder, options=f"{LAZY},data={mode}", calls=WRITING):
            published.append(_check_both(lender, alone=True))
    assert 0 < sum(published) < len(published)
    fault_row(
        "power cut: a borrower is made and publishes, its lender deletes and sweeps",
        f"loop ext4, commit=3600, data=ordered and data=writeback, {len(published)} copies mounted",
        f"0 borrowed experts lost ({sum(published)} versions there), the next publish worked "
        f"{len(published)} times",
    )
