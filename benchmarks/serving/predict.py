"""Measure `dne predict` beside wrk: the same files and connections, one server, in turns.

    python -m benchmarks.serving.predict [--files N] [--rounds N] [--connections N]
        [--preset P] [--json]

wrk sends bodies that were written before, each with as many images as `dne predict` puts into a
request. So it shows what the server can do with such requests. It needs wrk, as Debian has it.
`dne predict` reads files, writes bodies, reads answers and prints a table. The figure is the median
over the rounds, because each round has both under the same load of the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx

from benchmarks.figures import Figure, at_least, print_figures
from benchmarks.serving.one_server import made_up_photo, one_version, serving
from dne_client.clients import CONNECTIONS
from dne_client.images import GROUP_IMAGES

ASK = (sys.executable, "-c", "import sys; from dne_client.__main__ import main; sys.exit(main())")
WARM_UP_S = 2.0
LONGER = 3
BOUNDARY = "a-boundary-that-no-image-holds"
SCRIPT = """
local bodies, turn = {}, 0
for number = 1, %(bodies)d do
  local file = io.open("%(folder)s/" .. number, "rb")
  bodies[number] = file:read("*a")
  file:close()
end
wrk.method = "POST"
wrk.path = "/predict"
wrk.headers["Content-Type"] = "multipart/form-data; boundary=%(boundary)s"
function request()
  turn = turn %% #bodies + 1
  return wrk.format(nil, nil, nil, bodies[turn])
end
function done(summary, latency, requests)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.status + errors.timeout
  print(string.format('{"requests": %%d, "us": %%d, "failed": %%d}',
    summary.requests, summary.duration, failed))
end
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """A server, the files that it is asked about, and the bodies that hold them."""

    url: str
    files: Path
    script: Path
    images: int
    connections: int

    def wrk(self, seconds: float) -> float:
        """Return images a second."""
        command = ["wrk", "-t1", f"-c{self.connections}", f"-d{max(1, round(seconds))}s"]
        done = subprocess.run(
            [*command, "--timeout", "300s", "-s", str(self.script), self.url],
            check=True,
            capture_output=True,
            text=True,
        )
        told = json.loads(done.stdout.splitlines()[-1])
        assert told["failed"] == 0, done.stdout
        return 1e6 * GROUP_IMAGES * int(told["requests"]) / int(told["us"])

    def predict(self) -> tuple[float, float]:
        """Return images a second by the command's own clock, and by that of its caller, which
        counts the start of Python too."""
        command = ["predict", str(self.files), "--url", self.url, "--json"]
        began = time.perf_counter()
        done = subprocess.run(
            [*ASK, *command, "--connections", str(self.connections)],
            check=True,
            capture_output=True,
            text=True,
        )
        whole_s = time.perf_counter() - began
        told = json.loads(done.stdout.splitlines()[-1])
        assert told["answered"] == self.images, told["failed"]
        return self.images / float(told["seconds"]), self.images / whole_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure dne predict beside wrk.")
    parser.add_argument("--files", type=int, default=1000, help="files of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="of both clients")
    parser.add_argument("--preset", default="small", help="network: tiny, small or paper")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed: apt-get install wrk")
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = options.files - options.files % GROUP_IMAGES or GROUP_IMAGES
        files, script = _write_files(folder, images), _write_bodies(folder)
        store = one_version(folder / "models", preset=options.preset)
        with serving(store, "--max-wait-seconds", "300") as (url, _):
            turns = Turns(
                url=url, files=files, script=script, images=images, connections=options.connections
            )
            figures = measure(turns, options.rounds, measured)
    print_figures(figures, measured=measured, as_json=options.json)


def measure(turns: Turns, rounds: int, measured: dict[str, float]) -> list[Figure]:
    """Compare the two in turns. Each goes first in every other round. wrk takes longer, because it
    does not count the requests under way at its end."""
    turns.wrk(WARM_UP_S)
    own, whole, beside = [], [], []
    seconds = turns.images / turns.predict()[0]
    for number in range(rounds):
        for name in sorted(("dne", "wrk"), reverse=number % 2 == 1):
            if name == "wrk":
                beside.append(turns.wrk(LONGER * seconds))
            else:
                by_itself, by_caller = turns.predict()
                own.append(by_itself)
                whole.append(by_caller)
    ratios = [one / other for one, other in zip(own, beside, strict=True)]
    measured |= {
        "images a second by dne predict": median(own),
        "images a second by wrk": median(beside),
        "images a second by dne predict, with the start of Python": median(whole),
        "smallest of the ratios": min(ratios),
        "largest of the ratios": max(ratios),
        "files": float(turns.images),
        "connections": float(turns.connections),
        "rounds": float(rounds),
    }
    return [at_least("images a second by dne predict / by wrk", median(ratios), 0.95)]


def _write_files(folder: Path, images: int) -> Path:
    files = folder / "files"
    files.mkdir()
    for place in range(images):
        (files / f"{place:05}.jpg").write_bytes(made_up_photo(place))
    return files


def _write_bodies(folder: Path) -> Path:
    """Write the bodies as httpx writes those of `dne predict`, and the script that sends them."""
    files = sorted((folder / "files").iterdir())
    bodies = folder / "bodies"
    bodies.mkdir()
    groups = [files[first : first + GROUP_IMAGES] for first in range(0, len(files), GROUP_IMAGES)]
    for number, group in enumerate(groups, start=1):
        parts = [
            ("files", (one.name, one.read_bytes(), "application/octet-stream")) for one in group
        ]
        kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
        request = httpx.Request("POST", "http://x/predict", files=parts, headers=kind)
        (bodies / str(number)).write_bytes(request.read())
    script = folder / "wrk.lua"
    script.write_text(SCRIPT % {"bodies": len(groups), "folder": str(bodies), "boundary": BOUNDARY})
    return script


if __name__ == "__main__":
    main()
