"""Open the inbox of the served store, with one index for the whole server."""

from __future__ import annotations

import threading
from collections.abc import Callable

from model_store.inbox.inbox import Inbox
from model_store.inbox.index import Index
from model_store.store.store import Store


class Desk:
    """The inbox and its index. The store may come after the server. Thread-safe."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._open_store = open_store
        self._lock = threading.Lock()
        self._index: Index | None = None

    @property
    def inbox(self) -> Inbox:
        """Open the inbox. Raise StoreNotFound where there is no store yet."""
        return Inbox(self._open_store().objects)

    @property
    def index(self) -> Index:
        """Return the index, which is empty until it is refreshed."""
        inbox = self.inbox
        with self._lock:
            if self._index is None:
                self._index = Index(inbox)
            return self._index
