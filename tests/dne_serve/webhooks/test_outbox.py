"""Events reach their receivers, signed, within limits on time and memory."""

from __future__ import annotations

import base64
import logging
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dne_serve.settings import load_settings
from dne_serve.webhooks.events import Event
from dne_serve.webhooks.outbox import MOST_WAITING, Announcer, RetryPlan
from tests.dne_serve.access.test_exposure import certificate
from tests.dne_serve.receiver import (
    CLOSE,
    DRIP,
    ENDLESS,
    GARBAGE,
    HANG,
    INTERIM,
    receiving,
)
from tests.live_server import wait_for

SECRET = "whsec_" + base64.b64encode(b"0123456789" * 3).decode()
OTHER = "whsec_" + base64.b64encode(b"9876543210" * 3).decode()
BRISK = RetryPlan(try_s=0.25, waits_s=(0.01, 0.01))


def event(number: int = 1) -> Event:
    return Event(
        id=f"{'ab' * 16}/channels/production/{number}",
        type="dne.channel.promoted",
        source=f"/stores/{'ab' * 16}/channels/production",
        subject=f"versions/{number}",
        time="2026-03-01T09:30:00.000000Z",
        data={"version": number, "reason": "Vögel \u2028 <script>"},
    )


class Outcomes(list[str]):
    """The outcomes so far, in order."""

    def wait_for(self, *last: str) -> None:
        wait_for(lambda: self[-len(last) :] == [*last])


@contextmanager
def announcing(
    *urls: str, plan: RetryPlan = BRISK, **settings: Any
) -> Iterator[tuple[Announcer, Outcomes]]:
    outcomes = Outcomes()
    given = {"webhook": ",".join(urls), "webhook_secret": SECRET, **settings}
    announcer = Announcer(load_settings(**given), on_outcome=outcomes.append, plan=plan)
    announcer.start()
    yield announcer, outcomes
    announcer.stop()


def test_an_event_is_a_cloudevent_in_structured_mode() -> None:
    with receiving() as receiver, announcing(receiver.url) as (announcer, outcomes):
        announcer.announce(event(7))
        outcomes.wait_for("delivered")
        [post] = receiver.posts
    assert (post.method, post.path) == ("POST", "/")
    assert post.headers["content-type"] == "application/cloudevents+json"
    assert post.headers["user-agent"].startswith("dne-serve/")
    assert post.event == {
        "specversion": "1.0",
        "id": f"{'ab' * 16}/channels/production/7",
        "source": f"/stores/{'ab' * 16}/channels/production",
        "type": "dne.channel.promoted",
        "subject": "versions/7",
        "time": "2026-03-01T09:30:00.000000Z",
        "datacontenttype": "application/json",
        "data": {"version": 7, "reason": "Vögel \u2028 <script>"},
    }


@pytest.mark.parametrize("fault", [500, 503, 404, 429, HANG, DRIP, GARBAGE, CLOSE])
def test_a_post_that_fails_is_made_again_with_the_same_id(fault: int) -> None:
    with receiving(fault) as receiver, announcing(receiver.url) as (announcer, outcomes):
        announcer.announce(event())
        outcomes.wait_for("retried", "delivered")
        first, second = receiver.posts
    assert first.body == second.body
    assert first.headers["webhook-id"] == second.headers["webhook-id"]


@pytest.mark.parametrize("answer", [201, 204, ENDLESS, INTERIM])
def test_any_success_is_a_delivery_whatever_follows_its_status(answer: int) -> None:
    with receiving(answer) as receiver, announcing(receiver.url) as (announcer, outcomes):
        announcer.announce(event())
        outcomes.wait_for("delivered")
    assert len(receiver.posts) == 1


def test_tries_come_to_an_end_and_the_next_event_has_its_turn() -> None:
    with receiving(500, 500, 500) as receiver, announcing(receiver.url) as (announcer, outcomes):
        announcer.announce(event(1))
        announcer.announce(event(2))
        outcomes.wait_for("retried", "retried", "failed", "delivered")
    assert [post.event["data"]["version"] for post in receiver.posts] == [1, 1, 1, 2]


def test_the_tries_of_an_event_end_within_minutes() -> None:
    plan = RetryPlan()
    tries = 1 + len(plan.waits_s)
    assert tries == 10
    assert sum(plan.waits_s) + tries * plan.try_s < 6 * 60


@pytest.mark.parametrize("status", [301, 302, 307, 308, 410])
def test_a_redirect_is_not_followed_and_not_tried_again(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving(status) as receiver, announcing(receiver.url) as (announcer, outcomes):
        announcer.announce(event())
        outcomes.wait_for("failed")
    assert [post.path for post in receiver.posts] == ["/"]
    assert outcomes == ["failed"]
    assert str(status) in caplog.text


def test_a_dead_receiver_does_not_hold_up_the_others() -> None:
    plan = RetryPlan(try_s=20, waits_s=())
    with (
        receiving(HANG) as dead,
        receiving() as alive,
        announcing(dead.url, alive.url, plan=plan) as (announcer, outcomes),
    ):
        announcer.announce(event(1))
        dead.wait_for(1)
        announcer.announce(event(2))
        alive.wait_for(2)
        outcomes.wait_for("delivered", "delivered")
        assert not dead.released.is_set()
        dead.released.set()


def test_a_full_queue_drops_the_oldest_event() -> None:
    plan = RetryPlan(try_s=20, waits_s=())
    with (
        receiving(HANG) as receiver,
        announcing(receiver.url, plan=plan) as (one, outcomes),
    ):
        one.announce(event(0))
        receiver.wait_for(1)
        for number in range(1, MOST_WAITING + 3):
            one.announce(event(number))
        assert outcomes == ["dropped", "dropped"]
        receiver.released.set()
        posts = receiver.wait_for(1 + MOST_WAITING)
    versions = [post.event["data"]["version"] for post in posts]
    assert versions == [0, *range(3, MOST_WAITING + 3)]


def test_what_waits_is_posted_before_the_end() -> None:
    with receiving(500) as receiver:
        slow = RetryPlan(waits_s=(60, 60))
        with announcing(receiver.url, plan=slow) as (announcer, outcomes):
            announcer.announce(event(1))
            announcer.announce(event(2))
            outcomes.wait_for("retried")
    assert outcomes == ["retried", "delivered", "delivered"]


@pytest.mark.parametrize("answer", [HANG, DRIP])
def test_a_receiver_that_hangs_does_not_keep_the_server_from_stopping(
    answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dne_serve.webhooks.outbox.FLUSH_S", 0.1)
    plan = RetryPlan(try_s=20, waits_s=(60,))
    with receiving(answer) as receiver:
        with announcing(receiver.url, plan=plan) as (announcer, _):
            announcer.announce(event(1))
            announcer.announce(event(2))
            receiver.wait_for(1)
            stopped = time.monotonic()
        assert time.monotonic() - stopped < 5
        assert not receiver.released.is_set()


def test_a_certificate_that_nobody_vouches_for_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with receiving(tls=context) as receiver, announcing(receiver.url) as (announcer, outcomes):
        announcer.announce(event())
        outcomes.wait_for("failed")
        assert receiver.posts == []
    assert "its certificate was refused" in caplog.text


def test_a_trusted_certificate_is_spoken_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with receiving(tls=context) as receiver, announcing(receiver.url) as (announcer, outcomes):
        announcer.announce(event())
        outcomes.wait_for("delivered")


def test_the_secrets_of_a_url_reach_the_receiver_and_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with receiving(500, 302) as receiver:
        secret_url = receiver.url.replace("//", "//ann:hush%40h@") + "/hush/x?token=hush"
        with announcing(secret_url) as (announcer, outcomes):
            announcer.announce(event())
            outcomes.wait_for("retried", "failed")
        post = receiver.posts[0]
        port = receiver.url.rpartition(":")[2]
    assert post.path == "/hush/x?token=hush"
    assert base64.b64decode(post.headers["authorization"].split()[1]) == b"ann:hush@h"
    assert post.headers["host"] == f"127.0.0.1:{port}"
    assert f"webhook http://127.0.0.1:{port}: " in caplog.text
    assert "hush" not in caplog.text + repr(load_settings(webhook=secret_url))


def test_a_receiver_that_is_not_there_is_named_without_its_secrets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with receiving() as gone:
        url = gone.url
    with announcing(f"{url}/hush") as (announcer, outcomes):
        announcer.announce(event())
        outcomes.wait_for("failed")
    assert "Connection refused" in caplog.text
    assert "hush" not in caplog.text


def test_without_a_url_there_is_no_thread() -> None:
    announcer = Announcer(load_settings())
    announcer.start()
    announcer.announce(event())
    announcer.stop()
    assert not announcer.is_heard
