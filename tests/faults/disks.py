"""Disks of our own to break: small ones in memory, and ext4 in a file. Root only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *, options: str, kind: str, source: str | Path) -> Iterator[Path]:
    """`source` at `folder`, which is made; unmounted whatever happens. Skips where it may not."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", kind, "-o", options, str(source), str(folder)]
    if os.getuid() != 0:
        pytest.skip("disks can only be mounted by root")
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        _unmount(folder)


def _unmount(folder: Path) -> None:
    if subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode:
        # Somebody still has a file open on it: it goes when they close it, and is no more seen.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def small_disk(folder: Path, *, kib: int) -> Iterator[Path]:
    with mounted(folder, options=f"size={kib}k", kind="tmpfs", source="tmpfs") as disk:
        yield disk


def make_ext4(image: Path, *, mib: int) -> None:
    """An empty file system in a file. Nothing is left to the background, so that what is in the
    file changes only when somebody writes."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    with image.open("wb") as file:
        file.truncate(mib << 20)
    eager = "lazy_itable_init=0,lazy_journal_init=0"
    subprocess.run(["mkfs.ext4", "-q", "-F", "-E", eager, str(image)], check=True)


def free_space(disk: Path, *, kib: int) -> None:
    """Fills the disk until just `kib` are left; a filler that is there is replaced."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    left = os.statvfs(disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, left.f_bavail * left.f_bsize - (kib << 10)))
