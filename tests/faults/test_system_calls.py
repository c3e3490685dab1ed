"""Every system call of a publish, disturbed by strace in a process of its own: killed, or failed.

The short forms of most of these, without strace, are in `test_store_survives.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model_store import errors
from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.faults.intact import check_intact
from tests.model_store.drafts import publish_lineage

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

FILE_CALLS = (
    "openat", "mkdirat", "write", "fsync", "linkat", "unlinkat", "close",
    "read", "newfstatat", "getdents64",
)  # fmt: skip


def attempts_at(folder: Path, kind: str, effect: str, *syscalls: str) -> list[dict[str, Any]]:
    """How every attempt ended, each in a store of its own; all of them were really disturbed."""
    _need_strace()
    folder.mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults.disturbed", str(folder), kind, effect, *syscalls],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    attempts: list[dict[str, Any]] = json.loads((folder / "outcomes.json").read_text())
    assert attempts
    assert all(attempt["disturbed"] for attempt in attempts)
    return attempts


def _need_strace() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    if subprocess.run(["strace", "-qq", "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace may not trace here")


def _check_killed_publishes(attempts: list[dict[str, Any]]) -> int:
    """How many left version 2 behind, whole."""
    published = 0
    for attempt in attempts:
        store = Store.open(attempt["store"])
        assert store.versions() in ([1], [1, 2])
        published += store.versions() == [1, 2]
        assert store.versions() == [1, 2] or not attempt["acknowledged"]
        check_intact(store, head=1)
        shutil.rmtree(attempt["store"])
    return published


def _check_failed_publishes(attempts: list[dict[str, Any]]) -> tuple[int, int]:
    """How many were refused, and how many of these could not say whether they had published."""
    refused = unknown = 0
    for attempt in attempts:
        store = Store.open(attempt["store"])
        if attempt["acknowledged"]:  # the call that failed was of no account: an unlink in tmp/
            assert store.versions() == [1, 2]
        else:
            _check_says_why(attempt)
            refused += 1
            unknown += attempt["error"] == "OutcomeUnknown"
            assert store.versions() == [1] or attempt["error"] == "OutcomeUnknown"
        check_intact(store, head=1)
        shutil.rmtree(attempt["store"])
    return refused, unknown


def _check_syncs_told(attempts: list[dict[str, Any]]) -> None:
    """Every sync counts but the last one: it comes when the version is there, and tidies up."""
    assert len(attempts) > 10
    assert not any(attempt["acknowledged"] for attempt in attempts[:-1])


def _check_says_why(attempt: dict[str, Any]) -> None:
    raised = getattr(errors, attempt["error"], None)
    assert raised is not None, attempt
    assert issubclass(raised, errors.StoreError), attempt
    assert "\n" not in attempt["message"], attempt
    assert any(os.strerror(code) in attempt["message"] for code in range(1, 134)), attempt


def test_a_kill_at_a_link_or_a_sync_leaves_whole_versions_only(memory_path: Path) -> None:
    attempts = attempts_at(memory_path / "kills", "publish", "signal=KILL", "linkat", "unlinkat")
    assert 0 < _check_killed_publishes(attempts) < len(attempts)


def test_a_sync_that_the_kernel_fails_is_told(memory_path: Path) -> None:
    attempts = attempts_at(memory_path / "errors", "publish", "error=EIO", "fsync")
    _check_syncs_told(attempts)
    _, unknown = _check_failed_publishes(attempts)
    assert unknown > 0


@pytest.mark.slow
def test_campaign_a_kill_before_every_system_call_of_a_publish(
    memory_path: Path, fault_row: AddRow
) -> None:
    attempts = attempts_at(memory_path / "kills", "publish", "signal=KILL")
    assert len(attempts) > 100
    assert all(attempt["status"] == 9 for attempt in attempts)
    published = _check_killed_publishes(attempts)
    assert 0 < published < len(attempts)
    fault_row(
        "kill -9 before every system call of a publish",
        f"strace injection, {len(attempts)} calls",
        f"0 unreadable stores, 0 half versions ({published} whole, the others absent), "
        f"the next publish worked {len(attempts)} times",
    )


@pytest.mark.slow
def test_campaign_a_kill_before_every_system_call_of_a_rollback_and_of_a_new_store(
    memory_path: Path, fault_row: AddRow
) -> None:
    moves = attempts_at(memory_path / "rollbacks", "rollback", "signal=KILL")
    for attempt in moves:
        store = Store.open(attempt["store"])
        records = len(store.history("production"))
        assert records in (1, 2)
        assert records == 2 or not attempt["acknowledged"]
        check_intact(store, head=1)
    made = attempts_at(memory_path / "creations", "create", "signal=KILL")
    for attempt in made:
        store = Store.create(f"{attempt['store']}/fresh")
        assert publish_lineage(store, 1)[0].version == 1
        assert store.verify().problems == ()
    fault_row(
        "kill -9 before every system call of a rollback, and while a store is made",
        f"strace injection, {len(moves)} and {len(made)} calls",
        "0 unreadable stores; the channel is here or there; making the store again works",
    )


@pytest.mark.slow
def test_campaign_every_file_call_of_a_publish_fails(memory_path: Path, fault_row: AddRow) -> None:
    total = all_refused = all_unknown = 0
    for effect, syscalls in (
        ("error=EIO", FILE_CALLS),
        ("error=ENOSPC", ("openat", "mkdirat", "write", "linkat", "fsync")),
        ("error=EDQUOT", ("openat", "mkdirat", "write", "linkat", "fsync")),
    ):
        attempts = attempts_at(memory_path / effect, "publish", effect, *syscalls)
        _check_syncs_told([attempt for attempt in attempts if attempt["syscall"] == "fsync"])
        refused, unknown = _check_failed_publishes(attempts)
        total, all_refused, all_unknown = (
            total + len(attempts), all_refused + refused, all_unknown + unknown
        )  # fmt: skip
    fault_row(
        "disk full, quota, I/O error, failing fsync in every file call of a publish",
        f"strace injection, {total} calls",
        f"{all_refused} refused with a clear error and nothing acknowledged "
        f"({all_unknown} after the manifest had its name, and said so), "
        f"{total - all_refused} harmless; head unchanged {total} times",
    )
