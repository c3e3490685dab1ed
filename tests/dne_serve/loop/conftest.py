from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_store.loop.inbox import Inbox
from model_store.loop.label_studio import task_data
from model_store.records.inbox import ItemRecord
from model_store.store.store import Store
from tests.dne_serve.conftest import publish_digits, publish_letters
from tests.live_server import TOKEN, Live, live_server, png
from tests.model_store.loop.items import item_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A server of version 2 (a, b, 0, 1, 2) as Label Studio asks it."""

    live: Live
    inbox: Inbox

    def ask(self, name: str, body: dict[str, Any] | None = None) -> httpx.Response:
        path, headers = f"/label-studio/{name}", basic(TOKEN)
        if body is None:
            return self.live.http.get(path, headers=headers)
        return self.live.http.post(path, json=body, headers=headers)

    def add(self, seed: int = 0, **fields: Any) -> ItemRecord:
        """Add an item with a real picture of noise, answered by version 1."""
        picture = png(seed)
        made = item_record(f"noise {seed}", minutes=seed, label="b", score=0.25, **fields)
        found = {"sha256": hashlib.sha256(picture).hexdigest(), "bytes": len(picture)}
        record = made.model_copy(update={"picture": made.picture.model_copy(update=found)})
        self.inbox.add(record, picture)
        return record

    def data(self, item: ItemRecord) -> dict[str, Any]:
        return task_data(item, image=f"/data/upload/3/1234abcd-{item.id}.png", classes=["a", "b"])


def basic(password: str, *, user: str = "anybody") -> dict[str, str]:
    text = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {text}"}


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """Shared by a file: tests add items of their own."""
    store = Store.create(str(tmp_path_factory.mktemp("backend") / "models"))
    publish_digits(store, publish_letters(store))
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        yield Backend(live=live, inbox=Inbox(store.objects))
