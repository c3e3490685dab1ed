"""The store that a server follows: opened once, and found to be the same one at every look.

A directory that is not mounted, or a prefix that was emptied, looks like a store without versions;
another store in its place looks like a channel that has moved. Neither is followed.
"""

from __future__ import annotations

from dne_serve.errors import ChannelWentBack, StoreChanged
from model_store.errors import StoreNotFound
from model_store.records.channel import ChannelRecord
from model_store.store.store import Store


class SameStore:
    """Opens the store at a location when it is first asked for. Later calls read `store.json`
    again, which is one small read, and raise StoreChanged unless it names the same store.

    A store that is absent at first is looked for again.
    """

    def __init__(self, location: str) -> None:
        self._location = location
        self._store: Store | None = None

    def __call__(self) -> Store:
        store = self._store
        if store is None:
            opened = Store.open(self._location)
            self._store = store = self._store or opened  # another thread may have been faster
            return store
        _check_unchanged(store)
        return store


def _check_unchanged(store: Store) -> None:
    try:
        found = store.read_id()
    except StoreNotFound as error:
        raise StoreChanged(
            "the store has vanished: its store.json is not there; bring the store back, or restart "
            "this server to wait for another one"
        ) from error
    if found != store.id:
        raise StoreChanged(
            f"another store (id {found[:8]}…) is in the place of the one that this server follows "
            f"(id {store.id[:8]}…); bring that one back, or restart this server to follow the other"
        )


def check_onward(
    channel: str, *, seen: ChannelRecord | None, head: ChannelRecord | None, asked: bool
) -> None:
    """Raise ChannelWentBack where `head` is not the record seen last or a later one. Records are
    only ever appended. `asked`: somebody wants this head to be served, whatever was seen before."""
    if seen is None or (head is not None and asked):
        return
    if head is None:
        raise ChannelWentBack(
            f"channel {channel} has no record any more, and record {seen.number} was seen; bring "
            "the records back, or promote a version through this server"
        )
    if head.number < seen.number or (head.number == seen.number and head != seen):
        raise ChannelWentBack(
            f"channel {channel} went back to record {head.number}, and record {seen.number} was "
            "seen; bring the later records back, or move the channel through this server"
        )
