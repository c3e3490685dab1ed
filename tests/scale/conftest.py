"""A store of ten thousand versions, and one that the real trainer made, in a bucket."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from model_store.maintenance.copy import copy_store
from model_store.store.store import Store
from tests.campaigns import campaign
from tests.many_versions import write_versions
from tests.s3_server import SeaweedFS, reach
from tests.trained_store import TrainedStore

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A store that the real commands made, on a SeaweedFS that only this test uses."""

    server: SeaweedFS
    location: str
    store: Store
    trained: TrainedStore

    @property
    def image(self) -> bytes:
        return self.trained.image("a")

    @property
    def lineage(self) -> tuple[int, ...]:
        """The versions that one may release, oldest first. Others are never named."""
        made = self.trained
        return (made.first, made.second, made.third, made.renaming, made.extension)

    def release(self, number: int) -> int:
        """Move the channel for the n-th time: of three moves one is a rollback. Returns the version
        that is named."""
        to = self.lineage[number % len(self.lineage)]
        if number % 3 == 2:
            self.store.rollback(channel="production", to=to, actor="tests", reason="")
        else:
            self.store.promote(to, channel="production", actor="tests", reason="")
        return to


@pytest.fixture
def bucket(
    trained_store: TrainedStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Bucket]:
    server = SeaweedFS(tmp_path / "seaweedfs")
    try:
        server.start()
        location = reach(server.s3, monkeypatch, tmp_path)
        store = Store.create(location)
        copy_store(Store.open(str(trained_store.location)), store)
        yield Bucket(server=server, location=location, store=store, trained=trained_store)
    finally:
        server.stop()
