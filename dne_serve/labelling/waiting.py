"""Count the labels that wait for learning, and read them again only when something has changed."""

from __future__ import annotations

import threading

from dne_serve.server import Serving
from model_store.jobs.waiting import Waiting, find_waiting
from model_store.store.store import Store


class WaitingLabels:
    """The labels that wait, as they were at the last look. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: object = None
        self._found = Waiting()

    def find(self, serving: Serving, store: Store) -> Waiting:
        """Find the labels that wait for the served channel. They depend on its head and on the
        newest label record of each item, and both are known without reading a label."""
        index = serving.desk.index
        index.refresh()
        head = store.head(serving.settings.channel)
        rows = frozenset((row.id, row.number) for row in index.rows(["labelled"]))
        key = (head.number if head else 0, index.unread, rows)
        with self._lock:
            if key != self._key:
                self._found = find_waiting(store, index, head=store.resolve(head) if head else None)
                self._key = key
            return self._found
