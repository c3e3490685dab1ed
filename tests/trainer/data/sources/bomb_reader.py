"""Read one source in a process that may neither write nor take much: `python -m … FILE`.

Prints a JSON object: the error, and the memory that reading took.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from model_store.errors import DneError
from tests.trainer.data.sources.forms import listed
from trainer.data.hierarchy import read_parents
from trainer.data.sources import limits
from trainer.data.sources.limits import CHUNK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    error: str
    grown_bytes: int
    seconds: float


def read_in_child(path: Path, *, within_s: float = 600) -> Reading:
    """Read a source in a process of its own, which may write as much as the limits allow."""
    command = [sys.executable, "-m", __name__, str(path)]
    ended = subprocess.run(command, capture_output=True, timeout=within_s, check=True)
    return Reading(**json.loads(ended.stdout))


def main() -> None:
    path = Path(sys.argv[1])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    most = max(limits.FREE_BYTES, limits.MAX_RATIO * path.stat().st_size) + CHUNK_BYTES
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    before, began, error = _peak_bytes(), time.monotonic(), ""
    try:
        if path.suffix == ".yaml":
            read_parents(path)
        else:
            listed(path)
    except DneError as refusal:
        error = str(refusal)
    seconds = time.monotonic() - began
    told = {"error": error, "grown_bytes": _peak_bytes() - before, "seconds": seconds}
    print(json.dumps(told))


def _peak_bytes() -> int:
    """Return the peak of this program. `ru_maxrss` counts the one that started it too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) << 10


if __name__ == "__main__":
    main()
