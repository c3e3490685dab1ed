"""A store of ten thousand versions."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns import campaign
from tests.many_versions import write_versions

scale_row = campaign("scale")
VERSIONS = 10_000


@pytest.fixture(scope="session")
def large_store() -> Iterator[Path]:
    """Ten thousand versions of ten tasks, and as many channel records."""
    folder = Path(tempfile.mkdtemp(prefix="dne-scale-"))
    try:
        write_versions(folder / "models", count=VERSIONS, tasks=10)
        yield folder / "models"
    finally:
        shutil.rmtree(folder)
