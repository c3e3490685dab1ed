from __future__ import annotations

import pytest

from model_store.store.store import Store
from tests.model_store.drafts import publish_lineage


@pytest.fixture
def store(location: str) -> Store:
    """Versions 1, 2 and 3, promoted one after the other."""
    store = Store.open(location)
    publish_lineage(store, 3)
    return store
