"""The simulated fleet: it sends the requests that the server sends, and loses no byte."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from benchmarks.scale.fleet import Prices, a_poll, change, resized, start
from benchmarks.scale.fleet_events import Events, Link, Process
from benchmarks.scale.fleet_requests import Episodes, copy_of, count_requests
from benchmarks.scale.fleet_simulation import Assumptions, Fleet, Moves, Source
from tests.trained_store import TrainedStore

FEW = Assumptions(replicas=30, poll_s=1.0)
MOVES: Moves = [(5.0, "release"), (12.0, "rollback")]
SEEDS = 8
SOURCES: tuple[Source, ...] = ("bucket", "cache", "neighbour")
LATENCIES_S = 1.0
"""More than all the requests of a move take, one after the other."""


@pytest.fixture(scope="module")
def episodes(trained_store: TrainedStore) -> Episodes:
    """The requests of a replica on versions that the real trainer made, with fixed times to load.

    A measured time changes the order of the chance draws: the machine would decide a test.
    """
    bucket = copy_of(trained_store.location)
    counted = count_requests(bucket, older=trained_store.first, newer=trained_store.second)
    assert counted.load_s > 0
    assert counted.start_s > 0
    return replace(counted, load_s=0.02, start_s=0.02)


@pytest.mark.long
def test_a_long_history_costs_no_more_requests(
    trained_store: TrainedStore, episodes: Episodes
) -> None:
    aged = count_requests(
        copy_of(trained_store.location),
        older=trained_store.first,
        newer=trained_store.second,
        records=2500,
    )
    assert [one.verb for one in aged.look] == ["get", "list", "get"]
    assert 1 <= a_poll(aged) == a_poll(episodes) <= 1.1


def test_a_release_fetches_the_delta_and_a_rollback_no_shard(episodes: Episodes) -> None:
    fetched = [one.bytes for one in episodes.release if one.is_shard]
    assert sum(fetched) == episodes.delta_bytes
    assert not any(one.is_shard for one in episodes.rollback)
    assert sum(one.bytes for one in episodes.start if one.is_shard) == episodes.model_bytes


def test_a_seed_repeats_a_simulation(episodes: Episodes) -> None:
    first, again, other = (
        Fleet(episodes, replace(FEW, seed=seed), moves=MOVES, end_s=20.0).run()
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_every_replica_switches_within_a_poll_and_a_fetch(episodes: Episodes) -> None:
    found = Fleet(episodes, FEW, moves=MOVES, end_s=20.0).run()
    fetch_s = FEW.replicas * episodes.delta_bytes / (1e6 * FEW.bucket_mb_per_s)
    assert sorted(found.switched_s) == [1, 2]
    for move, longest_s in ((1, fetch_s + episodes.load_s), (2, 0.0)):
        assert len(found.switched_s[move]) == FEW.replicas
        assert min(found.switched_s[move]) > 0
        assert max(found.switched_s[move]) < FEW.poll_s + LATENCIES_S + longest_s


def test_the_bucket_sends_each_replica_the_delta_once_and_a_cache_or_neighbour_spares_it(
    episodes: Episodes,
) -> None:
    large = resized(episodes, 10_000_000)
    few = replace(FEW, replicas_a_cache=10)
    sent = {
        source: [
            change(large, replace(few, source=source, seed=seed), prices=Prices())
            for seed in range(SEEDS)
        ]
        for source in SOURCES
    }
    whole = FEW.replicas * large.delta_bytes / 1e9
    assert all(whole <= row["GB"] < 1.05 * whole for row in sent["bucket"])
    assert all(row["GB"] == pytest.approx(whole / 10, rel=0.05) for row in sent["cache"])
    # A seed alone decides little: 16 to 18 of the 30 replicas fetch from the bucket.
    assert mean(row["GB"] for row in sent["neighbour"]) < 0.6 * whole
    assert all(row["late"] == 0 for rows in sent.values() for row in rows)


def test_a_bucket_that_refuses_requests_is_asked_again_and_all_switch(episodes: Episodes) -> None:
    busy = change(episodes, replace(FEW, requests_per_s=45.0), prices=Prices())
    assert busy["refused"] > 0
    assert busy["late"] == 0


def test_a_start_fetches_whole_versions(episodes: Episodes) -> None:
    found = start(episodes, FEW)
    assert found["GB"] >= FEW.replicas * episodes.model_bytes / 1e9


def test_transfers_share_a_link_and_none_is_faster_than_a_replica() -> None:
    events, ended_s = Events(), []
    link = Link(events, bytes_per_s=100, each_bytes_per_s=60)

    def fetch(size: int) -> Process:
        yield link.transfer(size)
        ended_s.append(events.now_s)

    for size in (50, 150):
        events.begin(fetch(size))
    events.run()
    # Both at 50 a second until the first has its 50, then the second's last 100 at 60.
    assert ended_s == pytest.approx([1.0, 1.0 + 100 / 60])
    assert link.bytes == 200
