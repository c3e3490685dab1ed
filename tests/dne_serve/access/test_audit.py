"""The audit log: bounded, whole lines, and a throttle on what strangers can make it say."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dne_serve.access.audit import MOST, Audit, LineFile, LogThrottle
from tests.dne_serve.fake_engine import Clock
from tests.live_server import TOKEN, Live, live_server, wait_for


@pytest.fixture
def quiet(tmp_path: Path) -> Iterator[Live]:
    with live_server(tmp_path / "absent", audit_log=tmp_path / "audit") as live:
        yield live


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_long_path_is_noted_by_its_route(quiet: Live, tmp_path: Path) -> None:
    quiet.http.post(f"/v2/repository/models/{'%00' * 9000}/load")
    noted = (tmp_path / "audit").read_bytes()
    assert len(noted) < 300
    assert lines(tmp_path / "audit")[0]["action"].startswith("POST /v2/repository/models/{")


def test_refused_requests_have_a_brake_that_counts(tmp_path: Path) -> None:
    with live_server(tmp_path / "absent", audit_log=tmp_path / "audit") as live:
        for _ in range(MOST + 15):
            live.http.post("/rollback")
        for _ in range(3):
            live.admin("/rollback", token="wrong")
        for _ in range(MOST + 5):  # whoever has the token is always noted
            live.admin("/rollback", to=99)
        wait_for(lambda: len(lines(tmp_path / "audit")) == MOST + 3 + MOST + 5)
    noted = lines(tmp_path / "audit")
    assert [one["status"] for one in noted].count(401) == MOST + 1
    assert (noted[-1]["status"], noted[-1]["count"]) == (401, 15)
    assert "no line of their own" in noted[-1]["action"]


def test_a_brake_begins_anew_every_minute() -> None:
    clock = Clock()
    throttle = LogThrottle(most=2, window_s=60, clock=clock)
    assert [throttle.admits(401) for _ in range(5)] == [True, True, False, False, False]
    assert throttle.admits(403)
    assert throttle.take_left_out() == {}
    clock.now += 60
    assert throttle.take_left_out() == {401: 3}
    assert throttle.take_left_out() == {}
    assert [throttle.admits(401) for _ in range(3)] == [True, True, False]
    assert throttle.take_left_out(also_now=True) == {401: 1}


def test_texts_are_bounded(tmp_path: Path) -> None:
    Audit(tmp_path / "audit").note("x" * 5000, reason="\x00" * 5000, to=3)
    [noted] = lines(tmp_path / "audit")
    assert len(noted["action"]) < 1100
    assert len(noted["reason"]) < 1100
    assert noted["to"] == 3


@pytest.fixture
def disk_of_100_bytes() -> Iterator[None]:
    """A limit on the size of files takes a part of a write, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_does_not_fit_is_not_there_at_all(
    tmp_path: Path, disk_of_100_bytes: None
) -> None:
    file = LineFile(tmp_path / "audit")
    file.append(b"a" * 60)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            file.append(b"b" * 60)
    file.append(b"c" * 30)
    assert (tmp_path / "audit").read_bytes().split() == [b"a" * 60, b"c" * 30]


def test_where_a_part_cannot_be_cut_off_the_next_line_begins_anew(
    tmp_path: Path, disk_of_100_bytes: None
) -> None:
    path = tmp_path / "audit"
    file = LineFile(path)
    file.append(b"a" * 60)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # somebody else may be writing
        with pytest.raises(OSError, match="No space"):
            file.append(b"b" * 60)
    os.truncate(path, 80)  # as if there were room again
    file.append(b"c" * 15)
    assert path.read_bytes().split() == [b"a" * 60, b"b" * 19, b"c" * 15]


def append_many(path: Path, letter: bytes) -> None:
    file = LineFile(path)
    for _ in range(100):
        file.append(letter * 500)


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=append_many, args=(path, letter)) for letter in (b"a", b"b", b"c")
    ]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    written = path.read_bytes().splitlines()
    assert len(written) == 300
    assert {(line[:1] * 500 == line) for line in written} == {True}


def test_an_audit_log_may_be_a_pipe_or_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o200)
    Audit(tmp_path / "file").note("one")
    Audit(tmp_path / "file").note("two")
    (tmp_path / "file").chmod(0o600)
    assert len(lines(tmp_path / "file")) == 2
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        Audit(tmp_path / "pipe").note("one")
        assert json.loads(os.read(reader, 4096))["action"] == "one"
    finally:
        os.close(reader)


def test_a_full_disk_leaves_the_line_in_the_log_and_the_request_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    with live_server(tmp_path / "absent", audit_log=tmp_path / "audit") as live:
        monkeypatch.setattr(os, "write", lambda handle, data: len(data) // 2)
        assert live.admin("/rollback", token=TOKEN, to=99).status_code == 503
    assert "the audit log cannot be written" in caplog.text
    assert '"action": "POST /rollback"' in caplog.text
