"""Who labelled and deleted is in the audit log, also where it failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dne_serve.access.audit import MOST
from dne_serve.access.permission import Permission
from model_store.backends.local import LocalDirectory
from model_store.errors import WriteFailed
from model_store.loop.inbox import Inbox
from model_store.store.store import Store
from tests.dne_serve.conftest import publish_letters
from tests.dne_serve.every_route import scoped_routes
from tests.dne_serve.loop.conftest import Backend
from tests.dne_serve.loop.requests_of_1_23 import annotation_of, chosen, event
from tests.live_server import TOKEN, Live, live_server, wait_for
from tests.model_store.loop.items import add_item

CHANGING = {
    "POST /inbox",
    "POST /corrections",
    "POST /inbox/{item}/label",
    "DELETE /inbox/{item}",
    "POST /feedback",
    "POST /label-studio/webhook",
}
ADMIN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def audited(store: Store, tmp_path: Path) -> Iterator[Live]:
    publish_letters(store)
    with live_server(Path(store.location), audit_log=tmp_path / "audit") as live:
        live.wait_until_ready()
        yield live


def last_line(tmp_path: Path, *, count: int = 1) -> dict[str, Any]:
    """The newest line, once there are so many: it is written after the answer."""
    path = tmp_path / "audit"
    wait_for(lambda: path.exists() and len(path.read_text().splitlines()) >= count)
    found: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return found


def test_every_route_that_changes_labels_or_the_channel_is_audited() -> None:
    for route in scoped_routes():
        for method in route.methods or ():
            known = route.needs is Permission.ADMIN or f"{method} {route.path}" in CHANGING
            assert route.changes == known, f"{method} {route.path}"


def test_labels_feedback_and_events_have_a_line(
    audited: Live, store: Store, tmp_path: Path
) -> None:
    inbox = Inbox(store.objects)
    item = add_item(inbox, "a mug")
    audited.admin(f"/inbox/{item}/label", label="mug")
    line = last_line(tmp_path)
    assert (line["action"], line["status"]) == ("POST /inbox/{item}/label", 200)
    assert (line["item"], line["said"], line["record"]) == (item, "mug", 1)
    assert (line["who"], line["address"]) == ("", "127.0.0.1")  # the admin token has no name
    audited.admin("/feedback", id=item, wrong=True)
    line = last_line(tmp_path, count=2)
    assert (line["action"], line["said"], line["record"]) == ("POST /feedback", "wrong", 2)
    data = Backend(live=audited, inbox=inbox).data(inbox.item(item))
    audited.admin("/label-studio/webhook", **event("ANNOTATION_CREATED", told(), data))
    line = last_line(tmp_path, count=3)
    assert (line["event"], line["records"], line["status"]) == ("ANNOTATION_CREATED", 1, 200)
    audited.admin(f"/inbox/{item}/label", label="../up")
    assert last_line(tmp_path, count=4)["status"] == 422


def told() -> dict[str, Any]:
    return annotation_of(chosen("a"), time="2099-01-01T00:00:00.000000Z")


def test_a_deletion_has_a_line_also_if_it_fails_half_way(
    audited: Live, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = add_item(Inbox(store.objects), "a mug")
    real = LocalDirectory.delete

    def failing(self: LocalDirectory, name: str) -> None:
        if name.startswith("inbox/items"):
            raise WriteFailed(f"{name} could not be deleted")
        real(self, name)

    monkeypatch.setattr(LocalDirectory, "delete", failing)
    assert audited.http.delete(f"/inbox/{item}", headers=ADMIN).status_code == 503
    line = last_line(tmp_path)
    assert (line["action"], line["status"]) == ("DELETE /inbox/{item}", 503)
    assert (line["item"], line["who"]) == (item, "")
    monkeypatch.undo()
    audited.http.delete(f"/inbox/{item}", headers=ADMIN)
    assert last_line(tmp_path, count=2)["status"] == 200


def test_without_tokens_changes_have_lines_and_attempts_have_a_brake(
    store: Store, tmp_path: Path
) -> None:
    items = [add_item(Inbox(store.objects), f"{n}") for n in range(MOST + 5)]
    audit = tmp_path / "audit"
    with live_server(Path(store.location), admin_token=None, audit_log=audit) as live:
        for item in items:
            assert live.http.post(f"/inbox/{item}/label", json={"label": "a"}).status_code == 200
            assert live.http.post("/inbox/x/label", json={"label": "a"}).status_code == 404
        last_line(tmp_path, count=2 * MOST + 5)
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert sum(line["status"] == 200 for line in lines) == len(items)
    assert sum(line["status"] == 404 for line in lines) == MOST + 1
    assert (lines[-1]["status"], lines[-1]["count"]) == (404, 5)
