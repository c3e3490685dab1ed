"""Three servers of one bucket behind a real load balancer, under load: releases, rolling restarts,
a kill, and a store that is away.

HAProxy and nginx run with the files of `deploy/`, on other ports. What is not installed is skipped.
`SCALE_MINUTES` is the length of the long campaign.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.campaigns import AddRow
from tests.live_server import wait_for
from tests.s3_server import free_ports
from tests.scale.conftest import Bucket
from tests.scale.fleet import (
    AT_LEAST,
    Fleet,
    Moves,
    Seen,
    Sessions,
    balancer,
    running,
    served_by,
    status,
    url_of,
)
from tests.trained_store import ROOT

MINUTES = float(os.environ.get("SCALE_MINUTES", "10"))
SHORT_MINUTES = min(MINUTES, 3.0)
RESTARTS = 3
OUTAGE_S = 60.0
AFTERWARDS = 7
LATE_S = 3.0
SETTINGS = {"DNE_DRAIN_SECONDS": "3"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass
class Campaign:
    """Three servers behind a balancer, and sessions that ask it."""

    bucket: Bucket
    fleet: Fleet
    sessions: Sessions
    moves: Moves

    @property
    def seen(self) -> Seen:
        return self.sessions.seen

    def release_all(self, count: int, *, minutes: float) -> None:
        """Move the channel `count` times, evenly over the time."""
        began = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, began + number * minutes * 60 / count - time.monotonic()))
            self.moves.note(self.bucket.lineage[number % len(self.bucket.lineage)])
            self.bucket.release(number)

    def check(self) -> None:
        assert self.seen.failed == []
        assert (self.seen.never_named, self.seen.went_back) == (0, 0)


def skip_without(name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: NOTHING WAS TRIED BEHIND IT")


@contextmanager
def campaign(name: str, bucket: Bucket, folder: Path) -> Iterator[Campaign]:
    skip_without(name)
    front, *ports = free_ports(4)
    fleet = Fleet(bucket.location, ports=ports, folder=folder, settings=SETTINGS)
    moves = Moves(bucket.trained.served)
    with (
        running(fleet),
        balancer(name, front, ports, folder) as url,
        Sessions(url, image=bucket.image, moves=moves) as sessions,
    ):
        wait_for(lambda: sessions.seen.answered > 50, seconds=60)
        yield Campaign(bucket, fleet, sessions, moves)


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Do this on another thread meanwhile; an error fails the test at the end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    for error in errors:
        raise error


@pytest.mark.parametrize(
    ("name", "minutes", "releases"), [("haproxy", MINUTES, 50), ("nginx", SHORT_MINUTES, 20)]
)
def test_a_fleet_behind_a_balancer_loses_no_request(
    name: str,
    minutes: float,
    releases: int,
    bucket: Bucket,
    tmp_path: Path,
    scale_row: AddRow,
) -> None:
    with campaign(name, bucket, tmp_path) as run:
        began = time.monotonic()
        with beside(lambda: run.release_all(releases, minutes=minutes)):
            for part in range(1, RESTARTS + 1):
                time.sleep(max(0.0, began + (part - 0.5) * minutes * 15 - time.monotonic()))
                run.fleet.restart_one_by_one()
            time.sleep(max(0.0, began + 0.9 * minutes * 60 - time.monotonic()))
            run.fleet.kill_one()
        lasted_s = time.monotonic() - began
    run.check()
    assert len(run.seen.versions) > 3
    scale_row(
        f"three servers behind {name}, SeaweedFS",
        f"{lasted_s / 60:.1f} minutes, {releases} releases and rollbacks, {RESTARTS} rolling "
        "restarts, 1 kill -9, 4 sessions",
        run.seen.told(),
    )


@pytest.mark.parametrize("how", ["killed", "hanging"])
def test_serving_does_not_notice_a_store_that_is_away(
    how: str, bucket: Bucket, tmp_path: Path, scale_row: AddRow
) -> None:
    with campaign("haproxy", bucket, tmp_path) as run:
        before = time.monotonic()
        run.release_all(5, minutes=0.5)
        time.sleep(max(0.0, before + OUTAGE_S / 2 - time.monotonic()))
        down = time.monotonic()
        stop_for_a_while(bucket, how)
        up = time.monotonic()
        last = bucket.lineage[AFTERWARDS % len(bucket.lineage)]
        run.moves.note(last)
        bucket.release(AFTERWARDS)
        wait_for(lambda: served_by(run.fleet) == {last}, seconds=60)
        back_s = time.monotonic() - up
    run.check()
    usual, away = run.seen.times_of(before, down), run.seen.times_of(down, up)
    assert away.median_s < 2 * usual.median_s + 0.05
    scale_row(
        f"SeaweedFS {how} for {up - down:.0f} s, three servers behind haproxy",
        "5 releases before, 1 after, 4 sessions",
        f"{run.seen.told()}; {usual} before, {away} meanwhile; all serve the next release "
        f"{back_s:.1f} s after the return",
    )


def stop_for_a_while(bucket: Bucket, how: str) -> None:
    process = bucket.server.process
    assert process is not None
    if how == "killed":
        bucket.server.kill()
        time.sleep(OUTAGE_S)
        bucket.server.start()
        return
    process.send_signal(signal.SIGSTOP)
    time.sleep(OUTAGE_S)
    process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("name", ["haproxy", "nginx"])
def test_a_balancer_answers_when_servers_are_late_and_one_has_died(
    name: str, tmp_path: Path, scale_row: AddRow
) -> None:
    """The last try of a request may meet the dead server, before the balancer has noticed it."""
    skip_without(name)
    front, *ports = free_ports(4)
    with (
        late_servers(ports) as servers,
        balancer(name, front, ports, tmp_path) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        first = [client.post("/predict", headers={AT_LEAST: "1"}) for _ in range(10)]
        servers[0].kill()
        killed = time.monotonic()
        late: list[httpx.Response] = []
        while time.monotonic() < killed + LATE_S:
            late.append(client.post("/predict", headers={AT_LEAST: "2"}))
    assert {one.status_code for one in first} == {200}
    assert {(one.status_code, one.headers.get("retry-after")) for one in late} == {(503, "1")}
    scale_row(
        f"{name}: two servers are late, one has died",
        f"{len(late)} requests in {LATE_S:g} s on one connection",
        "all answered with 503 and Retry-After",
    )


@contextmanager
def late_servers(ports: Sequence[int]) -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-m", "tests.scale.late_server"]
    processes = [subprocess.Popen([*command, str(port)], cwd=ROOT) for port in ports]
    try:
        wait_for(lambda: all(status(url_of(port)) == 200 for port in ports), seconds=30)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
