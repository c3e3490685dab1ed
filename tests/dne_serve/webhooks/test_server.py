"""A server with webhooks tells its receivers, and waits for none of them."""

from __future__ import annotations

from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.receiver import HANG, Receiver, receiving
from tests.dne_serve.webhooks.test_news import REFUSED
from tests.live_server import Live, live_server, png, wait_for
from tests.packaging.import_graph import modules
from tests.tiny_versions import flip_last_bit, promote, publish_tiny


def told(receiver: Receiver, type: str, *, version: int) -> bool:
    events = [post.event for post in receiver.posts]
    return (type, version) in [(event["type"], event["data"]["version"]) for event in events]


def test_a_promotion_and_a_rollback_through_a_server_reach_the_receiver(
    store: Store, letters: Manifest
) -> None:
    with receiving() as receiver, live_server(store.location, webhook=receiver.url) as live:
        live.wait_until_ready()
        publish_tiny(store, tasks=[("x", ["x"])], parent=letters, seed=1)
        assert live.admin("/promote", to=2, reason="by a test").status_code == 200
        wait_for(lambda: told(receiver, "dne.channel.promoted", version=2))
        assert live.admin("/rollback", reason="by a test").status_code == 200
        wait_for(lambda: told(receiver, "dne.channel.rolled_back", version=1))
        wait_for(lambda: live.metric('dne_webhook_total{outcome="delivered"}') == 3)
        publish_tiny(store, gate=REFUSED)
        wait_for(lambda: told(receiver, "dne.version.refused", version=3))
    assert len(receiver.posts) == 4


def test_a_move_just_before_the_end_is_told(store: Store, letters: Manifest) -> None:
    """The server looks at the channel, and would look for news after the test."""
    with receiving() as receiver:
        with live_server(store.location, webhook=receiver.url) as live:
            live.wait_until_ready()
            live.serving._news._tick_s = 1000
            receiver.wait_for(1)
            publish_tiny(store, tasks=[("x", ["x"])], parent=letters, seed=1)
            assert live.admin("/promote", to=2, reason="").status_code == 200
        assert told(receiver, "dne.channel.promoted", version=2)


def test_a_version_that_cannot_be_loaded_is_told_by_the_server(
    store: Store, letters: Manifest
) -> None:
    with receiving() as receiver, live_server(store.location, webhook=receiver.url) as live:
        live.wait_until_ready()
        broken = publish_tiny(store, tasks=[("x", ["x"])], parent=letters, seed=1)
        flip_last_bit(store, broken.experts[-1])
        promote(store, broken)
        wait_for(lambda: told(receiver, "dne.version.not_loaded", version=2))
        assert live.predict(png()).json()["version"] == 1
    event = receiver.posts[-1].event
    assert event["data"]["serving"] == 1
    assert broken.experts[-1].sha256[:8] in event["data"]["error"]


def test_a_receiver_that_hangs_is_in_nobodys_way(store: Store, letters: Manifest) -> None:
    """All of this happens while the post is under way."""
    with receiving(HANG) as receiver, live_server(store.location, webhook=receiver.url) as live:
        receiver.wait_for(1)
        live.wait_until_ready()
        assert live.predict(png()).json()["version"] == 1
        promote(store, publish_tiny(store, tasks=[("x", ["x"])], parent=letters, seed=1))
        live.wait_until_serving(2)
        assert live.predict(png()).json()["version"] == 2
        assert live.metric('dne_webhook_total{outcome="delivered"}') == 0
        assert len(receiver.posts) == 1
        receiver.released.set()


def test_no_code_that_answers_or_follows_knows_of_webhooks() -> None:
    knowing = {
        module
        for module, path in modules("dne_serve").items()
        if "dne_serve.webhooks" in path.read_text() and ".webhooks" not in module
    }
    posts_traces = "dne_serve.observe.otlp"  # by the same means, on a thread of its own
    assert knowing == {"dne_serve.server", "dne_serve.shared", "dne_serve.cli", posts_traces}


def test_a_server_without_webhooks_has_no_thread_for_them(live: Live) -> None:
    assert not live.serving._news._thread.is_alive()
    assert not live.serving.webhooks.is_heard
