"""Every read route, for every version that the real commands made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from model_store.store import Store
from tests.live_server import Live, live_server
from tests.trained_store import TrainedStore


@pytest.fixture(scope="module")
def trained(trained_store: TrainedStore) -> Iterator[Live]:
    """Serves the trained store: no test of this file may change it."""
    with live_server(trained_store.location) as live:
        live.wait_until_ready()
        yield live


def test_the_route_of_a_version_answers_with_the_verdict_of_the_gate(
    trained: Live, trained_store: TrainedStore
) -> None:
    store = Store.open(str(trained_store.location))
    for number in trained_store.versions:
        answer = trained.http.get(f"/versions/{number}")
        assert answer.status_code == 200, answer.text
        kept = store.manifest(number)
        assert answer.json()["metrics"] == kept.metrics.model_dump(mode="json", by_alias=True)
        assert answer.json()["extended"] == list(kept.extended)
