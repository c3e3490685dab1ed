from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dne_serve.access import permission
from dne_serve.access.auth import MAX_ADDRESSES, MAX_KNOWN, Authorizer, FailedAuthThrottle
from dne_serve.access.permission import Permission, Token, digest_of, find
from dne_serve.errors import RateExceeded, TokenMissing, TokenRefused
from tests.dne_serve.fake_engine import Clock

PREDICT = Token(
    name="shop", permissions=frozenset({Permission.PREDICT}), digest=digest_of("shop-token")
)
READ = Token(
    name="grafana", permissions=frozenset({Permission.READ}), digest=digest_of("read-token")
)
ADMIN = Token(
    name="ops", permissions=frozenset({Permission.ADMIN}), digest=digest_of("admin-token")
)


def authorizer(*tokens: Token, clock: Clock | None = None) -> Authorizer:
    return Authorizer(lambda: tokens, clock=clock or Clock())


def test_predict_and_read_stand_open_until_a_token_names_them() -> None:
    for needed in (Permission.PREDICT, Permission.READ):
        assert authorizer().judge(None, needs=needed) is None
        assert authorizer(ADMIN).judge("Bearer nonsense", needs=needed) is None
    with pytest.raises(TokenMissing):
        authorizer(PREDICT).judge(None, needs=Permission.PREDICT)
    assert authorizer(PREDICT).judge(None, needs=Permission.READ) is None


def test_admin_is_closed_until_there_is_an_admin_token() -> None:
    for tokens in ((), (PREDICT, READ)):
        with pytest.raises(TokenRefused, match="no token with the scope 'admin'"):
            authorizer(*tokens).judge("Bearer shop-token", needs=Permission.ADMIN)
    assert authorizer(PREDICT, ADMIN).judge("Bearer admin-token", needs=Permission.ADMIN) is ADMIN


@pytest.mark.parametrize(
    ("token", "opened"),
    [
        ("shop-token", {Permission.OPEN, Permission.PREDICT}),
        ("read-token", {Permission.OPEN, Permission.READ}),
        ("admin-token", set(Permission)),
        ("another", {Permission.OPEN}),
    ],
)
def test_a_token_opens_what_its_scopes_say(token: str, opened: set[Permission]) -> None:
    doors = authorizer(PREDICT, READ, ADMIN)
    for needed in Permission:
        if needed in opened:
            doors.judge(f"Bearer {token}", needs=needed)
        else:
            with pytest.raises(TokenRefused):
                doors.judge(f"Bearer {token}", needs=needed)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic shop-token", "x"])
def test_what_is_no_bearer_token_is_missing(header: str | None) -> None:
    with pytest.raises(TokenMissing):
        authorizer(PREDICT).judge(header, needs=Permission.PREDICT)


def test_old_and_new_token_of_one_holder_both_open() -> None:
    new = Token(name="shop", permissions=PREDICT.permissions, digest=digest_of("new-token"))
    both = authorizer(PREDICT, new)
    assert both.judge("Bearer shop-token", needs=Permission.PREDICT) is PREDICT
    assert both.judge("bearer  new-token ", needs=Permission.PREDICT) is new


def test_a_door_that_was_closed_does_not_open_when_its_tokens_vanish() -> None:
    tokens: list[Token] = [PREDICT]
    doors = Authorizer(lambda: tokens)
    with pytest.raises(TokenMissing):
        doors.judge(None, needs=Permission.PREDICT)
    tokens.clear()
    with pytest.raises(TokenRefused):
        doors.judge("Bearer shop-token", needs=Permission.PREDICT)


def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one matches, and still all are compared."""
    compared: list[bytes] = []

    def watched(ours: bytes, theirs: bytes) -> bool:
        compared.append(ours)
        return hmac.compare_digest(ours, theirs)

    class Hmac:
        compare_digest = staticmethod(watched)

    monkeypatch.setattr(permission, "hmac", Hmac)
    tokens: Sequence[Token] = (PREDICT, READ, ADMIN)
    assert find(tokens, PREDICT.digest) is PREDICT
    assert compared == [token.digest for token in tokens]


def test_a_token_may_ask_so_often_and_is_told_when_to_come_back() -> None:
    clock = Clock()
    doors = authorizer(replace(PREDICT, rate=2), replace(ADMIN, rate=2), clock=clock)
    ask = lambda token: doors.judge(f"Bearer {token}", needs=Permission.PREDICT)  # noqa: E731
    ask("shop-token")
    ask("shop-token")
    with pytest.raises(RateExceeded) as refused:
        ask("shop-token")
    assert refused.value.retry_after_s == 1
    ask("admin-token")  # another token has an allowance of its own
    clock.now += 0.5
    ask("shop-token")
    with pytest.raises(RateExceeded):
        ask("shop-token")
    clock.now += 3600  # what is saved up is one second's worth
    ask("shop-token")
    ask("shop-token")
    with pytest.raises(RateExceeded):
        ask("shop-token")


def test_a_rate_may_be_slow() -> None:
    clock = Clock()
    slow = Token(name="slow", permissions=PREDICT.permissions, digest=digest_of("slow"), rate=0.1)
    doors = authorizer(slow, clock=clock)
    doors.judge("Bearer slow", needs=Permission.PREDICT)
    with pytest.raises(RateExceeded) as refused:
        doors.judge("Bearer slow", needs=Permission.PREDICT)
    assert refused.value.retry_after_s == 10
    clock.now += 10
    doors.judge("Bearer slow", needs=Permission.PREDICT)


def test_a_refused_token_costs_nobody_their_allowance() -> None:
    doors = authorizer(replace(PREDICT, rate=1))
    for _ in range(5):
        with pytest.raises(TokenRefused):
            doors.judge("Bearer guess", needs=Permission.PREDICT)
    doors.judge("Bearer shop-token", needs=Permission.PREDICT)


def guess(doors: Authorizer, token: str, *, address: str = "10.0.0.1") -> None:
    doors.judge(f"Bearer {token}", needs=Permission.ADMIN, address=address)


def guess_wrong(doors: Authorizer, times: int, *, address: str = "10.0.0.1") -> None:
    for number in range(times):
        with pytest.raises(TokenRefused):
            guess(doors, f"guess-{number}", address=address)


def test_twenty_wrong_tokens_in_a_minute_slow_an_address_down() -> None:
    clock = Clock()
    doors = authorizer(ADMIN, clock=clock)
    guess_wrong(doors, 20)
    for token in ("guess", "admin-token"):  # unseen, so that nobody learns which is right
        with pytest.raises(RateExceeded) as refused:
            guess(doors, token)
    assert refused.value.retry_after_s == 3
    guess(doors, "admin-token", address="10.0.0.2")
    clock.now += 3
    guess_wrong(doors, 1)
    with pytest.raises(RateExceeded):
        guess(doors, "guess")
    clock.now += 60
    guess_wrong(doors, 20)
    clock.now += 3
    guess(doors, "admin-token")


def test_a_stranger_behind_the_same_address_does_not_lock_a_holder_out() -> None:
    doors = authorizer(ADMIN)
    guess(doors, "admin-token")
    guess_wrong(doors, 20)
    with pytest.raises(RateExceeded):
        guess(doors, "guess")
    for _ in range(100):
        guess(doors, "admin-token")


def test_a_request_without_a_token_or_with_too_weak_a_one_is_no_guess() -> None:
    doors = authorizer(PREDICT, ADMIN)
    for header in [None, "Bearer shop-token"] * 50:
        with pytest.raises((TokenMissing, TokenRefused)):
            doors.judge(header, needs=Permission.ADMIN, address="10.0.0.1")
    guess(doors, "admin-token")


def test_the_addresses_of_one_ipv6_host_count_as_one() -> None:
    doors = authorizer(ADMIN)
    for number in range(20):
        guess_wrong(doors, 1, address=f"2001:db8::{number:x}")
    with pytest.raises(RateExceeded):
        guess(doors, "guess", address="2001:db8::ffff")
    guess_wrong(doors, 1, address="2001:db8:0:1::1")
    guess_wrong(doors, 10, address="10.0.0.9")
    guess_wrong(doors, 10, address="::ffff:10.0.0.9")
    with pytest.raises(RateExceeded):
        guess(doors, "guess", address="10.0.0.9")


def test_guessers_take_a_bounded_memory() -> None:
    failures = FailedAuthThrottle(Clock())
    for number in range(3 * MAX_ADDRESSES):
        failures.was_wrong(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
        failures.was_right("10.0.0.1", number.to_bytes(32))
    assert len(failures._by_address) == MAX_ADDRESSES
    assert max(len(one.known) for one in failures._by_address.values()) == MAX_KNOWN


def test_the_token_of_the_session_opens_all_doors_and_closes_none() -> None:
    doors = Authorizer(lambda: (), is_local=True)
    assert doors.why_closed(Permission.ADMIN) is not None
    secret = doors.begin_session()
    assert doors.why_closed(Permission.ADMIN) is None
    for needed in (Permission.PREDICT, Permission.READ, Permission.LABEL):
        assert doors.judge(None, needs=needed) is None
    token = doors.judge(f"Bearer {secret}", needs=Permission.ADMIN)
    assert token is not None
    assert token.name == "this-machine"
    with pytest.raises(TokenRefused, match="not known here"):
        doors.judge("Bearer another", needs=Permission.ADMIN)


def test_the_token_of_the_session_does_not_work_through_a_proxy() -> None:
    doors = Authorizer(lambda: (), is_local=True)
    secret = doors.begin_session()
    with pytest.raises(TokenRefused, match="no token with the scope 'admin'"):
        doors.judge(f"Bearer {secret}", needs=Permission.ADMIN, is_direct=False)
