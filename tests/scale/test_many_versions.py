"""What a store of ten thousand versions costs whoever looks at it, in CPU seconds and memory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.abuse.victim import serving
from tests.campaigns import AddRow
from tests.scale.conftest import VERSIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIST = (sys.executable, "-m", "model_store", "list")
LIST_CPU_S, LIST_MIB = 2.0, 150
PAGE_CPU_S, PAGE_MIB = 0.5, 50
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    cpu_s: float
    mib: float

    def told(self, *, cpu_s: float, mib: float) -> str:
        reached = "reached" if self.cpu_s < cpu_s and self.mib < mib else "not reached"
        return (
            f"{self.cpu_s:.2f} s CPU, {self.mib:.0f} MiB; asked {cpu_s:g} s, {mib:g} MiB: {reached}"
        )


def _run(*command: str, cache: Path) -> Cost:
    """CPU seconds, and the most memory, of a process of its own.

    A small process starts it: Linux counts the memory of whoever starts a process, too."""
    done = subprocess.run(
        (sys.executable, "-c", MEASURE, *command),
        stdout=subprocess.PIPE,
        env={**os.environ, "DNE_CACHE": str(cache)},
        check=True,
    )
    cpu_s, mib = map(float, done.stdout.split())
    return Cost(cpu_s=cpu_s, mib=mib)


def test_list_of_ten_thousand_versions(
    large_store: Path, tmp_path: Path, scale_row: AddRow
) -> None:
    where = ("--store", str(large_store))
    newest = _run(*LIST, *where, cache=tmp_path)
    first = _run(*LIST, "--all", *where, cache=tmp_path)
    again = _run(*LIST, "--all", *where, cache=tmp_path)
    script = _run(*LIST, "--json", *where, cache=tmp_path)
    for name, cost in (
        ("dne-store list", newest),
        ("dne-store list --all, the first time", first),
        ("dne-store list --all, again", again),
        ("dne-store list --json, again", script),
    ):
        told = cost.told(cpu_s=LIST_CPU_S, mib=LIST_MIB)
        scale_row(name, f"{VERSIONS} versions of ten tasks", told)
        assert cost.mib < LIST_MIB
    for cost in (newest, again, script):
        assert cost.cpu_s < LIST_CPU_S


def test_pages_of_ten_thousand_versions(large_store: Path, scale_row: AddRow) -> None:
    with serving("--store", str(large_store), "--poll-seconds", "600") as server:
        httpx.get(f"{server.url}/readyz", timeout=60)
        for name, query in (
            ("GET /versions, the first time", ""),
            ("GET /versions, again", ""),
            ("GET /versions, far back", "?before=100"),
            ("GET /versions, 1000 of them", "?limit=1000"),
            ("GET /versions, 1000 of them, again", "?limit=1000"),
        ):
            before_s, before = _cpu_s(server.process.pid), server.resident_bytes()
            answer = httpx.get(f"{server.url}/versions{query}", timeout=120)
            assert answer.status_code == 200
            assert answer.json()["total"] == VERSIONS
            grown = max(0, server.peak_bytes() - before) / (1 << 20)
            cost = Cost(cpu_s=_cpu_s(server.process.pid) - before_s, mib=grown)
            told = cost.told(cpu_s=PAGE_CPU_S, mib=PAGE_MIB)
            scale_row(name, f"{VERSIONS} versions; growth of the server", told)
            server.forget_peak()
            assert cost.mib < PAGE_MIB
            if name.endswith("again"):
                assert cost.cpu_s < PAGE_CPU_S


def _cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
