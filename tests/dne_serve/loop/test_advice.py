"""`GET /versions/{n}/advice` on a store that the real trainer made."""

from __future__ import annotations

from pathlib import Path

from model_store.layout import advice_name
from tests.live_server import TOKEN, live_server
from tests.trained_store import TrainedStore

BEARER = {"Authorization": f"Bearer {TOKEN}"}


def test_who_may_label_reads_advice_and_who_may_not_sees_none(trained_copy: TrainedStore) -> None:
    folder = Path(trained_copy.pretrained)
    with live_server(folder) as live:
        live.wait_until_ready()
        answer = live.http.get("/versions/2/advice", headers=BEARER)
        assert answer.status_code == 200
        body = answer.json()
        assert body["version"] == 2
        assert 1 <= len(body["advice"]["lines"]) <= 5
        named = {one["class"] for one in body["advice"]["classes"]}
        classes = live.http.get("/classes", headers=BEARER).json()["classes"]
        assert named == {one["label"] for one in classes}

        assert live.http.get("/versions/2/advice").status_code in (401, 403)
        assert live.http.get("/versions/99/advice", headers=BEARER).status_code == 404

        (folder / advice_name(2)).unlink()
        answer = live.http.get("/versions/2/advice", headers=BEARER)
        assert answer.json() == {"version": 2, "advice": None}

        (folder / advice_name(1)).chmod(0o600)
        (folder / advice_name(1)).write_bytes(b"{}")
        answer = live.http.get("/versions/1/advice", headers=BEARER)
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
