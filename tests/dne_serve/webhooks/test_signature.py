"""Posts are signed so that a receiver can tell who made them, by the documented function."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dne_serve.webhooks.outbox import parse_secrets, sign
from tests.dne_serve.receiver import receiving
from tests.dne_serve.webhooks.test_outbox import OTHER, SECRET, announcing, event
from tests.packaging.project import ROOT


@pytest.fixture(scope="module")
def is_genuine() -> Callable[..., bool]:
    """The function that the documentation shows to receivers."""
    text = (ROOT / "docs/operations.md").read_text()
    [block] = [one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "hmac" in one]
    names: dict[str, Any] = {}
    exec(block, names)
    found: Callable[..., bool] = names["is_genuine"]
    return found


def test_a_receiver_can_tell_who_posted(is_genuine: Callable[..., bool]) -> None:
    with receiving() as receiver, announcing(receiver.url) as (announcer, _):
        announcer.announce(event())
        [post] = receiver.wait_for(1)
    assert post.headers["webhook-id"] == post.event["id"]
    assert abs(int(post.headers["webhook-timestamp"]) - time.time()) < 60
    assert is_genuine(post.headers, post.body, SECRET)
    assert not is_genuine(post.headers, post.body, OTHER)
    assert not is_genuine(post.headers, post.body + b" ", SECRET)
    assert not is_genuine({**post.headers, "webhook-id": "x"}, post.body, SECRET)
    old = str(int(time.time()) - 600)
    stale = sign(parse_secrets(SECRET), id="x", timestamp=int(old), body=b"{}")
    replayed = {"webhook-id": "x", "webhook-timestamp": old, "webhook-signature": stale}
    assert not is_genuine(replayed, b"{}", SECRET)


def test_the_signature_is_that_of_the_specification() -> None:
    """The example of the specification's own reference libraries."""
    made = sign(
        parse_secrets("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
        id="msg_p5jXN8AQM9LWM0D4loKWxJek",
        timestamp=1614265330,
        body=b'{"test": 2432232314}',
    )
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_during_a_change_of_the_secret_both_receivers_are_content(
    tmp_path: Path, is_genuine: Callable[..., bool]
) -> None:
    (tmp_path / "secrets").write_text(f"{OTHER}\n{SECRET}\n")
    file = str(tmp_path / "secrets")
    with (
        receiving() as receiver,
        announcing(receiver.url, f"secret-file={file}") as (announcer, _),
    ):
        announcer.announce(event())
        [post] = receiver.wait_for(1)
    assert is_genuine(post.headers, post.body, SECRET)
    assert is_genuine(post.headers, post.body, OTHER)


def test_without_a_secret_posts_are_not_signed_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with receiving() as receiver, announcing(receiver.url, webhook_secret=None) as (announcer, _):
        announcer.announce(event())
        [post] = receiver.wait_for(1)
    assert "webhook-signature" not in post.headers
    assert "webhooks are not signed" in caplog.text
