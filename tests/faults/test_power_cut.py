"""The power fails in the middle of a publish: what was acknowledged is there, and nothing torn.

The store is on ext4 in a file, which writes its journal only when it is told to (`commit`). A
copy of the file between two calls of the publisher is what a power cut at that moment leaves.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.faults.disks import make_ext4, mounted
from tests.faults.intact import check_intact
from tests.model_store.drafts import publish_lineage

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

LAZY = "loop,commit=3600"  # seconds: only an fsync makes anything durable

# What an open or a close changes is seen before the next of these.
WRITING = frozenset({"mkdir", "write", "fsync", "link", "unlink"})


@dataclass(slots=True)
class Acknowledged:
    """What the publisher was told is there, and so must be there after every later cut."""

    digests: dict[int, str] = field(default_factory=dict)
    targets: dict[int, int] = field(default_factory=dict)

    def note(self, line: str) -> None:
        said = json.loads(line)
        if "version" in said:
            self.digests[said["version"]] = said["digest"]
        else:
            self.targets[said["record"]] = said["target"]

    def check(self, store: Store) -> None:
        """Everything acknowledged is there, at most one thing more, and all of it is whole."""
        found = {version: store.manifest(version).digest for version in store.versions()}
        assert found.items() >= self.digests.items()
        assert len(found) <= len(self.digests) + 1
        records = {record.number: record.target for record in store.history("production")}
        assert records.items() >= self.targets.items()
        assert len(records) <= len(self.targets) + 1
        check_intact(store, head=records[max(records)])


@contextmanager
def publisher(location: Path, *, publishes: int | str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.faults.stepping_publisher", str(location)]
    with subprocess.Popen(
        [*command, str(publishes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def copy_of(image: Path, cut: Path) -> None:
    """The disk as it is at one moment: taken again if the kernel wrote meanwhile."""
    while True:
        before = image.stat().st_mtime_ns
        shutil.copyfile(image, cut)
        if image.stat().st_mtime_ns == before:
            return


def _cut_while_publishing(
    folder: Path, *, publishes: int, options: str, calls: frozenset[str]
) -> int:
    """Cuts before each of `calls` and after each acknowledgement: how often."""
    image, cut = folder / "disk.img", folder / "cut.img"
    make_ext4(image, mib=16)
    cuts = 0
    with mounted(folder / "disk", options=options, kind="ext4", source=image) as disk:
        store = Store.create(str(disk / "models"))
        (first,) = publish_lineage(store, 1)
        acknowledged = Acknowledged({1: first.digest}, {1: 1})
        with publisher(disk / "models", publishes=publishes) as running:
            assert running.stdin is not None
            assert running.stdout is not None
            for line in running.stdout:
                if line.startswith("{"):
                    acknowledged.note(line)
                if line.startswith("{") or line.strip() in calls:
                    copy_of(image, cut)
                    with mounted(folder / "cut", options="loop", kind="ext4", source=cut) as after:
                        acknowledged.check(Store.open(str(after / "models")))
                    cuts += 1
                running.stdin.write("\n")
                running.stdin.flush()
            assert running.wait(30) == 0
    assert len(acknowledged.digests) == publishes + 1
    assert len(acknowledged.targets) == publishes + 1
    return cuts


def test_a_power_cut_after_a_link_loses_nothing_that_was_acknowledged(memory_path: Path) -> None:
    calls = frozenset({"unlink"})  # linked, and not synced yet
    assert _cut_while_publishing(memory_path, publishes=1, options=LAZY, calls=calls) >= 6


@pytest.mark.slow
def test_campaign_a_power_cut_before_every_call_that_writes(
    memory_path: Path, fault_row: AddRow
) -> None:
    cuts = 0
    for mode in ("ordered", "writeback"):
        folder = memory_path / mode
        folder.mkdir()
        options = f"{LAZY},data={mode}"
        cuts += _cut_while_publishing(folder, publishes=2, options=options, calls=WRITING)
    assert cuts >= 100
    fault_row(
        "power cut",
        f"loop ext4, commit=3600, data=ordered and data=writeback, {cuts} copies mounted",
        "0 acknowledged versions or records lost, 0 torn visible, "
        f"the next publish worked {cuts} times",
    )
