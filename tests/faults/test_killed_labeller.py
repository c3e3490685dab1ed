"""A process that is killed while it labels: no label that it has told of is lost."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from model_store.backends.local import LocalDirectory
from model_store.loop.inbox import Inbox
from model_store.loop.item_names import removed_name
from model_store.loop.items import delete_leftovers, open_index, read_items

KILLS = 30


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_label_is_lost_and_nothing_deleted_comes_back(tmp_path: Path) -> None:
    said: dict[str, dict[int, str]] = {}
    for seed in range(KILLS):
        for line in _killed(tmp_path, after_s=random.Random(seed).uniform(0.0, 0.3)):
            item, number, label = line.split()
            said.setdefault(item, {})[int(number)] = label
    inbox = Inbox(LocalDirectory(tmp_path))
    index = open_index(inbox)
    assert index.unread == 0
    kept = {item: labels for item, labels in said.items() if 0 not in labels}
    assert len(kept) > KILLS
    for item, labels in kept.items():
        if index.find(item) is None:
            assert len(labels) == 2  # it was about to be deleted when the process was killed
            continue
        found = {one.number: one.label for one in inbox.history(item)}
        assert labels.items() <= found.items()
    whole = list(read_items(inbox, index.rows()))
    assert len(whole) == len(index)
    assert all(inbox.picture(one.record) for one in whole)
    deleted = set(said) - set(kept)
    # A mark stays, so that nobody who is late brings the item back.
    marks = {removed_name(item) for item in deleted}
    names = set(inbox.objects.list_names("inbox")) - marks
    assert not [name for name in names for item in deleted if item in name]
    delete_leftovers(inbox, index, days=1, now=datetime.now(UTC) + timedelta(days=2))
    left = inbox.objects.list_names("inbox/items")
    assert len(left) == len(index)


def _killed(folder: Path, *, after_s: float) -> list[str]:
    """Start a labeller, kill it some time after its first word, and return its whole lines."""
    command = [sys.executable, "-m", "tests.faults.killed_labeller", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        timer = threading.Timer(after_s, process.kill)
        timer.start()
        lines = [first, *process.stdout]
        timer.join()
    return [line for line in lines if line.endswith("\n")]
