"""What must hold of a store after anything that happened to it."""

from __future__ import annotations

from model_store.store.store import Store
from tests.model_store.drafts import prepare


def check_intact(store: Store, *, head: int) -> None:
    """Whole versions only, the channel where it was, and the next publish works."""
    report = store.verify()
    assert report.problems == ()
    record = store.head("production")
    assert record is not None
    assert record.target == head
    store.resolve(record)
    newest = store.newest()
    assert newest is not None
    again = prepare(parent=store.manifest(1), task="again", images=1, seed=1).publish(store)
    assert again.version == newest + 1
    assert store.verify().problems == ()
