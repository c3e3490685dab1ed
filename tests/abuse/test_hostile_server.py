"""A hostile server against the commands that ask servers, in processes that are measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.hostile_server import answers, hostile
from tests.live_server import png

SIZE_BYTES = 1 << 30
MOST_BYTES = 700 << 20
"""The peak of a whole process. `dne-train` takes 100 MiB before it asks anything."""
DEADLINE_S = 5.0
RUN = """
import sys
import dne_client.clients
import trainer.loop.label_studio_client as client
seconds = float(sys.argv.pop(1))
dne_client.clients.DEADLINE_S = client.ANSWER_S = seconds
dne_client.clients.Client.__init__.__kwdefaults__["deadline_s"] = seconds
dne_client.clients.Client.__init__.__kwdefaults__["retries"] = dne_client.Retries(attempts=1)
client.TRIES = 1
main = __import__(sys.argv[1], fromlist=["main"]).main
code = main(sys.argv[2:])
peak, = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak.split()[1], file=sys.stderr)
sys.exit(code)
"""


def peak_and_code(*arguments: str) -> tuple[int, int, str]:
    """Run a command, and return the peak of its memory, its exit code and its errors."""
    command = [sys.executable, "-c", RUN, str(DEADLINE_S), *arguments]
    environment = {**os.environ, "DNE_LABEL_STUDIO_TOKEN": "0123456789abcdef"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    *told, peak_kib = ended.stderr.splitlines()
    return int(peak_kib) << 10, ended.returncode, "\n".join(told)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hostile_server_campaign(tmp_path: Path, abuse_row: AddRow) -> None:
    store = Store.create(str(tmp_path / "models"))
    (tmp_path / "a.png").write_bytes(png(1))
    most, slowest, asked = 0, 0.0, 0
    for name, (pieces, wait_s) in answers(SIZE_BYTES).items():
        with hostile(pieces, wait_s=wait_s) as server:
            label_studio = ["--store", store.location, "--url", server.url, "--project", "1"]
            for command in (
                ["dne_client.__main__", "predict", str(tmp_path / "a.png"), "--url", server.url],
                ["trainer.cli", "label-studio", "pull", *label_studio],
                ["trainer.cli", "label-studio", "push", *label_studio],
            ):
                began = time.monotonic()
                peak, code, told = peak_and_code(*command)
                assert code == 1, (name, command, told)
                assert "Traceback" not in told, (name, command, told)
                assert peak < MOST_BYTES, (name, command, peak)
                most, asked = max(most, peak), asked + 1
                slowest = max(slowest, time.monotonic() - began)
    assert slowest < 60
    abuse_row(
        "hostile server against the clients",
        f"{len(answers(1))} answers to `dne predict`, `label-studio pull` and `push`: "
        + "; ".join(answers(1)),
        f"{asked} commands end with 1 and a sentence; memory at most {most >> 20} MiB, slowest "
        f"{slowest:.0f} s (deadline {DEADLINE_S:g} s, one byte every 100 ms)",
    )
