"""When the servers of a fleet switch: within one poll of the record, or together at its moment."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pytest

from model_store.records.channel import ChannelRecord
from tests.campaigns import AddRow
from tests.s3_server import free_ports
from tests.scale.conftest import Bucket
from tests.scale.fleet import Fleet, running
from tests.scale.switching import Switch, watching

POLL_S = 2.0
SETTLE_S = 5.0
READS_S = 0.75
"""For the reads of the store, and the look from outside, on a machine that has much else to do."""
MOVES = 12

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def switches(bucket: Bucket, folder: Path, *, settle_s: float, to: tuple[int, ...]) -> list[Switch]:
    """Promote these versions in turn on three servers that have all of them in memory."""
    settings = {"DNE_POLL_SECONDS": str(POLL_S), "DNE_SETTLE_SECONDS": str(settle_s)}
    fleet = Fleet(bucket.location, ports=free_ports(3), folder=folder, settings=settings)
    with running(fleet), watching(fleet.ports) as watch:
        for version in sorted({*to}):
            watch.switch_to(promote(bucket, version))
        found = []
        for place, version in enumerate(to):
            time.sleep(0.3 * (place % 7))  # anywhere between two polls
            found.append(watch.switch_to(promote(bucket, version)))
        return found


def promote(bucket: Bucket, version: int) -> ChannelRecord:
    return bucket.store.promote(version, channel="production", actor="tests", reason="")


def test_all_servers_switch_within_one_poll_of_the_record(
    bucket: Bucket, tmp_path: Path, scale_row: AddRow
) -> None:
    to = (bucket.trained.first, bucket.trained.second) * (MOVES // 2)
    found = switches(bucket, tmp_path, settle_s=0, to=to)
    last_s = max(max(one.after_s) for one in found)
    assert last_s <= POLL_S + READS_S
    scale_row(
        "three servers on SeaweedFS follow a record",
        f"{MOVES} promotions of versions in memory, polls of {POLL_S:g} s",
        f"the last server {last_s:.2f} s after the record; mixed versions for "
        f"{median(one.mixed_s for one in found):.2f} s (median), "
        f"{max(one.mixed_s for one in found):.2f} s (longest)",
    )


def test_with_settling_all_servers_switch_at_the_moment_of_the_record(
    bucket: Bucket, tmp_path: Path, scale_row: AddRow
) -> None:
    to = (bucket.trained.first, bucket.trained.second) * (MOVES // 2)
    found = switches(bucket, tmp_path, settle_s=SETTLE_S, to=to)
    early_s = min(min(one.after_s) for one in found) - SETTLE_S
    late_s = max(max(one.after_s) for one in found) - SETTLE_S
    assert early_s >= 0
    assert late_s <= READS_S
    scale_row(
        f"the same with --settle-seconds {SETTLE_S:g}",
        f"{MOVES} promotions of versions in memory, polls of {POLL_S:g} s",
        f"between {1000 * early_s:.0f} and {1000 * late_s:.0f} ms after the moment; mixed versions "
        f"for {1000 * median(one.mixed_s for one in found):.0f} ms (median), "
        f"{1000 * max(one.mixed_s for one in found):.0f} ms (longest)",
    )
