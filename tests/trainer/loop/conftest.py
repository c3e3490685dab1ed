from __future__ import annotations

from pathlib import Path

import pytest

from model_store.loop.inbox import Inbox
from model_store.store.store import Store
from tests.tiny_versions import promote, publish_tiny
from tests.trainer.loop.fake_label_studio import FakeLabelStudio


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Version 1 knows cats and dogs."""
    made = Store.create(str(tmp_path / "models"))
    promote(made, publish_tiny(made, tasks=[("animals", ["cat", "dog"])]))
    return made


@pytest.fixture
def inbox(store: Store) -> Inbox:
    return Inbox(store.objects)


@pytest.fixture
def fake() -> FakeLabelStudio:
    return FakeLabelStudio()
