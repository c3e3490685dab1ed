"""Run as a program: does something to a store again and again, and strace disturbs every call.

`disturbed FOLDER KIND EFFECT [SYSCALL …]` does KIND (one of `killed_publisher`) once undisturbed
and notes its system calls. Then for each of them, or each of the named ones, in a fresh copy of
the store, EFFECT (`signal=KILL`, `error=EIO`, …) is injected into that call. FOLDER/1, FOLDER/2,
… are the stores that come of it, and FOLDER/outcomes.json says how each attempt ended.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model_store.store.store import Store
from tests.faults.killed_publisher import KINDS
from tests.model_store.drafts import publish_lineage

PATIENCE_S = 30
SIGN = 123456789
"""No process group: what strace makes `getpgid` answer, and so the sign that it is there."""
UNSTEADY = frozenset({"getpgid", "brk", "mmap", "munmap", "madvise"})
"""Calls that are not of the store: the sign itself, and those by which a heap grows or shrinks. The
next run may not need them, and the disk holds the same before and after."""
_CALL = re.compile(r"^(\w+)\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Attempt:
    """`acknowledged`: the caller was told that it is done. `status`: as `waitpid` gives it."""

    acknowledged: bool
    error: str
    message: str
    status: int


def main(folder: str, kind: str, effect: str, *wanted: str) -> None:
    root = Path(folder)
    publish_lineage(Store.create(str(root / "template")), 1)
    outcomes: list[dict[str, Any]] = []
    for syscall, count in _calls_of(root, kind).items():
        if wanted and syscall not in wanted:
            continue
        for number in range(1, count + 1):
            store = root / str(len(outcomes) + 1)
            shutil.copytree(root / "template", store)
            attempt, log = _run_traced(store, kind, syscall, f"{effect}:when={number}")
            failed = any(
                line.startswith(f"{syscall}(") and "(INJECTED)" in line for line in log.split("\n")
            )
            disturbed = failed or os.WIFSIGNALED(attempt.status)
            place = {"store": str(store), "syscall": syscall, "number": number}
            outcomes.append({**place, "disturbed": disturbed, **asdict(attempt)})
    (root / "outcomes.json").write_text(json.dumps(outcomes))


def _calls_of(root: Path, kind: str) -> Counter[str]:
    """How often an undisturbed run makes each system call."""
    shutil.copytree(root / "template", root / "undisturbed")
    attempt, log = _run_traced(root / "undisturbed", kind, "all", "")
    if not attempt.acknowledged:
        sys.exit(f"the undisturbed run failed: {attempt.message or attempt.status}")
    return Counter(call for call in _CALL.findall(log) if call not in UNSTEADY)


def _run_traced(store: Path, kind: str, syscall: str, effect: str) -> tuple[Attempt, str]:
    """One run in a child process that does nothing before strace holds it, and strace's log."""
    said = mmap.mmap(-1, 4096)  # shared: to say something through it takes no system call
    child = os.fork()
    if child == 0:
        _await_tracer()
        _say_how_it_ends(said, KINDS[kind], str(store))
        os._exit(0)
    log = store.with_suffix(".log")
    signs = ["-e", f"trace={syscall},getpgid", "-e", f"inject=getpgid:retval={SIGN}"]
    injected = ["-e", f"inject={syscall}:{effect}"] if effect else []
    strace = ["strace", "-qq", "-o", str(log), *signs, *injected, "-p", str(child)]
    held = subprocess.run(strace, timeout=2 * PATIENCE_S, check=False).returncode
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit(f"strace (exit code {held}) could not take hold of the process")
    return Attempt(**_heard(said), status=status), log.read_text()


def _await_tracer() -> None:
    """Returns when strace has shown that it sees our calls: it answers one of them falsely."""
    until = time.monotonic() + PATIENCE_S
    while os.getpgid(0) != SIGN:
        if time.monotonic() > until:
            os._exit(1)


def _say_how_it_ends(said: mmap.mmap, action: Callable[[str], None], location: str) -> None:
    try:
        action(location)
        ended = {"acknowledged": True, "error": "", "message": ""}
    except Exception as error:
        # An unexpected one is for the test to judge: its name is not that of a StoreError.
        ended = {"acknowledged": False, "error": type(error).__name__, "message": str(error)}
    text = json.dumps(ended).encode()
    said[: len(text)] = text


def _heard(said: mmap.mmap) -> dict[str, Any]:
    text = said[:].rstrip(b"\0")
    heard: dict[str, Any] = json.loads(
        text or '{"acknowledged": false, "error": "", "message": ""}'
    )
    return heard


if __name__ == "__main__":
    main(*sys.argv[1:])
