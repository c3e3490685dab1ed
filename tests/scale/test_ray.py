"""Ray, for real: releases, a kill, a redeploy and autoscaling under load, and jobs that train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.live_server import wait_for
from tests.scale.load import Load
from tests.scale.ray_cluster import SLOW_S, Cluster, needs_ray, ray_cluster
from tests.trained_store import TrainedStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_ray]

MOVES = 6
ON_NEW_VERSION_S = 5.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def fleet(cluster: Cluster, trained_copy: TrainedStore) -> Iterator[Cluster]:
    """Two replicas of the store that the test may change."""
    cluster.deploy(trained_copy.location)
    cluster.wait_until_running(2)
    yield cluster
    cluster.remove()
    wait_for(lambda: cluster.application() == {}, seconds=SLOW_S)


def test_a_promotion_and_a_rollback_reach_all_replicas_and_fail_nothing(
    fleet: Cluster, trained_copy: TrainedStore, scale_row: AddRow
) -> None:
    store = Store.open(str(trained_copy.location))
    served, longest_s = trained_copy.served, 0.0
    with Load(fleet.url, image=trained_copy.image("a"), clients=4) as load:
        wait_for(lambda: load.answered > 50, seconds=SLOW_S)
        for to in (trained_copy.first, trained_copy.second) * (MOVES // 2):
            move(store, to)
            moved = time.monotonic()
            time.sleep(ON_NEW_VERSION_S + 1)
            longest_s = max(longest_s, load.last_by(served, since=moved))
            served = to
    assert load.failed == []
    assert {one.version for one in load.asked} == {
        trained_copy.first,
        trained_copy.second,
        trained_copy.served,
    }
    assert longest_s <= ON_NEW_VERSION_S
    scale_row(
        "Ray Serve, 2 replicas: promote and rollback",
        f"{MOVES} moves, 4 clients",
        f"{load.answered} answered, 0 failed; all replicas on the new version after "
        f"{longest_s:.1f} s at most",
    )


def move(store: Store, to: int) -> None:
    if to == 1:
        store.rollback(channel="production", to=to, actor="tests", reason="")
    else:
        store.promote(to, channel="production", actor="tests", reason="")


def test_a_killed_replica_fails_only_the_requests_on_it(
    fleet: Cluster, trained_copy: TrainedStore, scale_row: AddRow
) -> None:
    image = trained_copy.image("a")
    with (
        Load(fleet.url, image=image, clients=4) as plain,
        Load(fleet.url, image=image, clients=4, attempts=10) as patient,
    ):
        wait_for(lambda: min(plain.answered, patient.answered) > 50, seconds=SLOW_S)
        victim, *_ = fleet.replicas()
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_for(lambda: victim.name not in fleet.running(), seconds=SLOW_S)
        fleet.wait_until_running(2)
        replaced_s = time.monotonic() - killed
        so_far = plain.answered
        wait_for(lambda: plain.answered > so_far + 50, seconds=SLOW_S)
    assert [one for one in plain.failed if one.began > killed] == []
    assert patient.failed == []
    scale_row(
        "Ray Serve, 2 replicas: kill -9 of one",
        "4 clients without and 4 with retries",
        f"{plain.answered + patient.answered} answered; {len(plain.failed)} failed that were on "
        f"it, 0 others; with retries 0 ({patient.retried} sent again); replaced after "
        f"{replaced_s:.0f} s",
    )


def test_a_rolling_redeploy_fails_nothing(
    fleet: Cluster, trained_copy: TrainedStore, scale_row: AddRow
) -> None:
    def change(application: dict[str, Any]) -> None:
        application["args"]["poll_seconds"] = 0.2

    before = fleet.running()
    with Load(fleet.url, image=trained_copy.image("a"), clients=4) as load:
        wait_for(lambda: load.answered > 50, seconds=SLOW_S)
        began = time.monotonic()
        fleet.deploy(trained_copy.location, change)
        wait_for(lambda: not before & {one.name for one in fleet.replicas()}, seconds=SLOW_S)
        fleet.wait_until_running(2)
        took_s = time.monotonic() - began
        so_far = load.answered
        wait_for(lambda: load.answered > so_far + 50, seconds=SLOW_S)
    assert load.failed == []
    scale_row(
        "Ray Serve, 2 replicas: rolling redeploy",
        "other arguments, 4 clients",
        f"{load.answered} answered, 0 failed, both replaced after {took_s:.0f} s",
    )


def test_replicas_come_and_go_with_the_queue(
    cluster: Cluster, trained_copy: TrainedStore, scale_row: AddRow
) -> None:
    def change(application: dict[str, Any]) -> None:
        [deployment] = application["deployments"]
        deployment["autoscaling_config"] = {
            "min_replicas": 1,
            "max_replicas": 3,
            "target_ongoing_requests": 2,
            "look_back_period_s": 2,
            "upscale_delay_s": 1,
            "downscale_delay_s": 2,
        }

    cluster.deploy(trained_copy.location, change)
    cluster.wait_until_running(1)
    image = trained_copy.image("a")
    with Load(cluster.url, image=image, clients=1) as steady:
        with Load(cluster.url, image=image, clients=12) as crowd:
            wait_for(lambda: len(cluster.running()) == 3, seconds=SLOW_S)
            so_far = crowd.answered
            wait_for(lambda: crowd.answered > so_far + 50, seconds=SLOW_S)
        cluster.wait_until_running(1)
        so_far = steady.answered
        wait_for(lambda: steady.answered > so_far + 20, seconds=SLOW_S)
    cluster.remove()
    wait_for(lambda: cluster.application() == {}, seconds=SLOW_S)
    assert crowd.failed == steady.failed == []
    scale_row(
        "Ray Serve: autoscaling 1 → 3 → 1",
        "1 client, then 12 more for a while",
        f"{crowd.answered + steady.answered} answered, 0 failed",
    )


def test_an_empty_store_is_told_and_a_version_can_be_deployed_after_it(
    cluster: Cluster, trained_copy: TrainedStore, tmp_path: Path, scale_row: AddRow
) -> None:
    def change(application: dict[str, Any]) -> None:
        application["args"]["start_seconds"] = 3
        [deployment] = application["deployments"]
        deployment["autoscaling_config"] = {"min_replicas": 1, "max_replicas": 1}

    empty = tmp_path / "models"
    cluster.deploy(empty, change)
    wait_for(lambda: cluster.application().get("status") == "DEPLOY_FAILED", seconds=SLOW_S)
    assert f"nothing to serve from {empty} after 3 s: there is no store yet" in told(cluster)
    trained_copy.location.rename(empty)
    cluster.deploy(empty)
    cluster.wait_until_running(2)
    assert httpx.get(f"{cluster.url}/readyz").json()["version"] == trained_copy.served
    cluster.remove()
    wait_for(lambda: cluster.application() == {}, seconds=SLOW_S)
    scale_row(
        "Ray Serve: an empty store",
        "deployed, then again with a version",
        "DEPLOY_FAILED with the reason, then served",
    )


def told(cluster: Cluster) -> str:
    """What `serve status` shows of the deployment."""
    deployments = cluster.application().get("deployments", {})
    return str(deployments.get("dne", {}).get("message", ""))


def start_job(cluster: Cluster, store: Path, data: Path, *others: str) -> subprocess.Popen[str]:
    """`dne-train add-task --on ray` with a relative path, which the job cannot use as it is."""
    command = [sys.executable, "-c", "import sys; from trainer.cli import main; sys.exit(main())"]
    options = ["--on", "ray", "--ray-address", cluster.address, "--store", str(store), "--json"]
    small = ["--preset", "tiny", "--epochs", "3", "--augment", "none", "--threads", "1"]
    return subprocess.Popen(
        [*command, "add-task", "--data", data.name, *options, *small, *others],
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=data.parent,
        # A shell that runs the tests in the background has them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_task_is_learnt_as_a_job_and_followed_from_here(
    cluster: Cluster, trained_store: TrainedStore, tmp_path: Path, scale_row: AddRow
) -> None:
    letters, digits = trained_store.data("letters"), trained_store.data("digits")
    began = time.monotonic()
    first = start_job(cluster, tmp_path / "models", letters)
    out, err = first.communicate(timeout=SLOW_S)
    took_s = time.monotonic() - began
    assert first.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["version"] == 1
    assert "accuracy" in err
    second = start_job(cluster, tmp_path / "models", digits, "--ray-upload", "--min-new", "100%")
    out, err = second.communicate(timeout=SLOW_S)
    answer = json.loads(out.splitlines()[-1])
    assert (second.returncode == 3) is not answer["promoted"], err
    assert Store.open(str(tmp_path / "models")).manifest(2).tasks[-1].name == "digits"
    again = start_job(cluster, tmp_path / "models", letters)
    again.communicate(timeout=SLOW_S)
    assert again.returncode == 1  # the classes are known already
    scale_row(
        "dne-train add-task --on ray",
        "a job by path, one by upload, one that fails",
        f"exit codes and JSON are the jobs' own; the first took {took_s:.0f} s",
    )


def test_ctrl_c_stops_the_job_and_publishes_nothing(
    cluster: Cluster, trained_store: TrainedStore, tmp_path: Path
) -> None:
    store, letters = tmp_path / "models", trained_store.data("letters")
    process = start_job(cluster, store, letters, "--epochs", "100000")
    assert process.stderr is not None
    assert any("images/s" in line for line in process.stderr)  # it learns
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SLOW_S)
    assert process.returncode == 1
    assert "has ended: STOPPED" in err
    assert not store.exists() or Store.open(str(store)).versions() == []
