"""What a fleet asks of its bucket while nothing changes, counted before the S3 server."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.campaigns import AddRow
from tests.s3_proxy import proxy_before
from tests.s3_server import free_ports
from tests.scale.conftest import Bucket
from tests.scale.fleet import Fleet, running

SERVERS = 3
POLL_S = 0.1
SECONDS = 60.0
MOST = 1.1

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_poll_takes_one_request_of_the_bucket(
    bucket: Bucket, tmp_path: Path, scale_row: AddRow
) -> None:
    head = bucket.store.head("production")
    assert head is not None
    with proxy_before(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        settings = {"DNE_POLL_SECONDS": str(POLL_S), "AWS_ENDPOINT_URL": proxy.endpoint}
        fleet = Fleet(
            bucket.location, ports=free_ports(SERVERS), folder=tmp_path, settings=settings
        )
        with running(fleet):
            time.sleep(5)  # until all have looked at the whole channel once
            proxy.seen.clear()
            time.sleep(SECONDS)
            paths = [request.path for request, _ in list(proxy.seen)]
    glances = sum(f"/{head.number + 1:08}.json" in path for path in paths)
    looks = sum("/store.json" in path for path in paths)
    polls = glances + looks  # a poll glances at the next record, or looks at everything
    assert glances > 100
    assert looks > 0
    assert len(paths) / polls <= MOST
    scale_row(
        f"{SERVERS} servers on SeaweedFS while nothing changes",
        f"{SECONDS:g} s, polls of {POLL_S:g} s, {polls} polls counted by a proxy",
        f"{len(paths) / polls:.3f} requests a server a poll, asked at most {MOST:g}",
    )
