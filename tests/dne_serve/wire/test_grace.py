"""The process is gone soon after --grace-seconds, although the store has not answered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from model_store.loop.inbox import Inbox
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.loop.requests_of_1_23 import annotation_of, chosen, event
from tests.live_server import wait_for
from tests.model_store.loop.items import add_item

GRACE_S = 2
SOON_S = 15
"""More than the stop takes on a slow machine, and far less than the labels would."""
PROGRAM = """
import sys, time
from pathlib import Path
from model_store.loop.inbox import Inbox
judge = Inbox.judge
def slow(*given, **options):
    with Path({log!r}).open("a") as log:
        log.write("begun ")
    time.sleep({seconds})
    return judge(*given, **options)
Inbox.judge = slow
from dne_serve.cli import main
sys.exit(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.2, 600], ids=["slow", "hanging"])
def test_labels_under_way_do_not_hold_a_server_that_is_told_to_stop(
    store: Store, digits: Manifest, tmp_path: Path, seconds: float
) -> None:
    inbox = Inbox(store.objects)
    item = add_item(inbox, "a mug")
    begun = tmp_path / "begun"
    program = PROGRAM.format(log=str(begun), seconds=seconds)
    options = ["--store", store.location, "--port", "0", "--json", "--grace-seconds", str(GRACE_S)]
    with subprocess.Popen(
        [sys.executable, "-c", program, *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DNE_BACKEND": "torch"},  # nothing is measured
    ) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        told = event("ANNOTATIONS_CREATED", {}, {})
        told["annotation"] = [annotation_of(chosen("ab"[n % 2]), number=n) for n in range(1, 500)]
        told["task"] = [{"data": {"item": item, "image": f"{item}.png"}}] * 499

        def tell() -> None:
            with suppress(httpx.TransportError):
                httpx.post(f"{url}/label-studio/webhook", json=told, timeout=60)

        telling = threading.Thread(target=tell)
        telling.start()
        try:
            wait_for(begun.exists, seconds=60)
            process.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            assert process.wait(timeout=60) == 0
            took_s = time.monotonic() - began_s
        finally:
            process.kill()
            telling.join()
    assert GRACE_S - 1 < took_s < GRACE_S + SOON_S
    written = len(begun.read_text().split())
    assert len(inbox.history(item)) >= written - 1  # each is whole, and at most one was given up
    assert written < 100
