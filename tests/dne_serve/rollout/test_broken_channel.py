"""A server whose channel has something in its way that is no record."""

from __future__ import annotations

from pathlib import Path

from model_store.cli.main import main
from model_store.store.store import Store
from tests.live_server import Live, assert_problem, png, wait_for


def test_the_server_goes_on_and_says_so_until_the_channel_is_mended(
    live: Live, store: Store
) -> None:
    junk = Path(store.location, "channels/production/99999999.json")
    junk.write_bytes(b"junk")
    wait_for(lambda: live.http.get("/readyz").json()["error"] is not None)
    told = live.http.get("/readyz").json()
    assert told["version"] == 2
    assert "channels/production/99999999.json" in told["error"]
    assert "dne-store mend-channel" in told["error"]
    assert live.predict(png()).json()["version"] == 2
    assert_problem(live.admin("/rollback", to=1), 503, says="dne-store mend-channel")
    body = live.http.get("/versions").json()
    assert [one["number"] for one in body["history"]] == [1, 2]
    assert "99999999" in body["problems"][0]
    assert main(["mend-channel", "--yes", "--store", store.location]) == 0
    wait_for(lambda: live.http.get("/readyz").json()["error"] is None)
    assert live.admin("/rollback", to=1).status_code == 200
    assert live.predict(png()).json()["version"] == 1
