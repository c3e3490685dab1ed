from __future__ import annotations

from pathlib import Path

import pytest

from model_store.backends.base import Objects
from model_store.backends.local import LocalDirectory
from model_store.backends.s3 import ObjectStorage
from model_store.records.signing import Keys, Signer, Trust, new_signer
from model_store.store.store import Store
from tests.model_store.backends import MemoryObjects, WatchedObjects


@pytest.fixture(params=["directory", "memory", "seaweedfs"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    """Every backend that there is: the promises of the store hold on each."""
    if request.param == "seaweedfs":
        return ObjectStorage(request.getfixturevalue("s3_location"))
    return LocalDirectory(tmp_path / "models") if request.param == "directory" else MemoryObjects()


@pytest.fixture
def watched(objects: Objects) -> WatchedObjects:
    return WatchedObjects(objects)


@pytest.fixture
def store(watched: WatchedObjects) -> Store:
    return Store.create("models", objects=watched)


@pytest.fixture
def location(tmp_path: Path) -> str:
    """An empty store in a directory."""
    return Store.create(str(tmp_path / "models")).location


@pytest.fixture
def ann(tmp_path: Path) -> Signer:
    return new_signer(tmp_path / "ann.pem")


@pytest.fixture
def keys(ann: Signer) -> Keys:
    return Keys(signer=ann, trust=Trust({"ann": ann.public}))
