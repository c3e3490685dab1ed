"""Start dne-serve on a store for a benchmark, and wait until it answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START = (sys.executable, "-c", "import sys; from dne_serve.cli import main; sys.exit(main())")
START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnServer:
    url: str
    pid: int

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")


@contextmanager
def own_server(location: Path, *options: str, admin_token: str = "") -> Iterator[OwnServer]:
    """Serve a store on a free port of this machine, and stop at the end."""
    surroundings = {**os.environ, **({"DNE_ADMIN_TOKEN": admin_token} if admin_token else {})}
    process = subprocess.Popen(
        [*START, "--store", str(location), "--port", "0", "--json", *options],
        stdout=subprocess.PIPE,
        env=surroundings,
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        _wait_for(url)
        yield OwnServer(url=url, pid=process.pid)
    finally:
        process.terminate()
        process.wait()


def _wait_for(url: str) -> None:
    ends = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/readyz").close()
            return
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.1)
