"""Channel records and jobs that are signed for one store, and readers that take no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_store.errors import (
    JobNotFound,
    KeyMissing,
    NothingToRollBack,
    SignatureRefused,
    WrongUsage,
)
from model_store.layout import record_name
from model_store.loop.claim import job_name, made_name
from model_store.loop.jobs import Jobs
from model_store.records.manifest import Manifest
from model_store.records.sealing import seal
from model_store.records.signing import Keys, Trust, new_signer
from model_store.store.store import Store
from tests.model_store import reader
from tests.model_store.backends import MemoryObjects
from tests.model_store.drafts import prepare

WHO: dict[str, Any] = {"channel": "production", "actor": "ann", "reason": ""}


@pytest.fixture
def held() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def signing(held: MemoryObjects, keys: Keys) -> Store:
    """A store of three signed versions. A signed record of the channel names the second."""
    store = Store.create("models", objects=held, keys=keys)
    parent: Manifest | None = None
    for seed in range(3):
        made = prepare(parent=parent, seed=seed)
        parent = store.publish(made.draft, shards=made.shards, signer=keys.signer)
    for version in (1, 2):
        store.promote(version, **WHO)
    return store


@pytest.fixture
def stranger(held: MemoryObjects, signing: Store) -> Store:
    """The same store, as a writer without a key has it."""
    return Store.open("models", objects=held)


def _plant(held: MemoryObjects, name: str, body: dict[str, Any]) -> None:
    """Write a record over another one, sealed anew."""
    body.pop("digest", None)
    held.held[name] = seal(body)


def _body(held: MemoryObjects, name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(held.held[name])
    return body


def test_the_signature_of_a_channel_record_is_that_of_the_documented_bytes(
    held: MemoryObjects, signing: Store
) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    record, _ = reader.read_channel(held.held.__getitem__, held.list_names, "production")
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(record["signature"]["key"]))
    assert record["signature"]["store"] == signing.id
    message = reader.signed_message(record, "channel")
    key.verify(bytes.fromhex(record["signature"]["value"]), message)


def test_a_record_without_a_signature_has_the_bytes_that_it_always_had(
    held: MemoryObjects, stranger: Store
) -> None:
    stranger.promote(1, **WHO)
    assert "signature" not in _body(held, record_name("production", 3))


def test_every_move_is_signed_and_trusted(signing: Store, keys: Keys) -> None:
    moves = [
        signing.promote(3, **WHO),
        signing.rollback(to=None, **WHO),
        signing.resume(**WHO),
    ]
    assert all(one.signature for one in moves)
    assert signing.head("production") == moves[-1]
    assert signing.verify(trust=keys.trust).ok


def test_a_record_that_a_stranger_writes_is_not_read_and_the_next_one_goes_on_after_it(
    signing: Store, stranger: Store
) -> None:
    stranger.promote(1, **WHO)
    with pytest.raises(SignatureRefused, match=r"00000003.json cannot be trusted: it is not sign"):
        signing.head("production")
    assert signing.promote(3, **WHO).number == 4


def test_a_rollback_does_not_listen_to_records_of_strangers(
    signing: Store, stranger: Store
) -> None:
    signing.promote(3, **WHO)
    stranger.promote(1, **WHO)
    stranger.promote(3, **WHO)
    assert signing.rollback(to=None, **WHO).target == 2


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"number": 3}, "does not fit"),
        ({"number": 3, "target": 3}, "does not fit"),
        ({"number": 3, "mode": "pin"}, "does not fit"),
        ({"number": 3, "signature": None}, "not signed"),
    ],
)
def test_a_record_that_is_replayed_or_changed_is_refused(
    held: MemoryObjects, signing: Store, changed: dict[str, Any], says: str
) -> None:
    body = {**_body(held, record_name("production", 1)), **changed}
    _plant(held, record_name("production", 3), body)
    with pytest.raises(SignatureRefused, match=says):
        signing.head("production")


def test_a_record_of_another_channel_is_refused(held: MemoryObjects, signing: Store) -> None:
    signing.promote(3, **{**WHO, "channel": "staging"})
    body = {**_body(held, record_name("staging", 1)), "channel": "production", "number": 3}
    _plant(held, record_name("production", 3), body)
    with pytest.raises(SignatureRefused, match="does not fit"):
        signing.head("production")


def test_a_record_of_another_store_is_refused(
    held: MemoryObjects, signing: Store, keys: Keys
) -> None:
    other = Store.create("other", objects=MemoryObjects(), keys=keys)
    made = prepare()
    other.publish(made.draft, shards=made.shards, signer=keys.signer)
    other.promote(1, **{**WHO, "channel": "staging"})
    name = record_name("staging", 1)
    held.held[name] = other.objects.read(name, max_bytes=1 << 20)
    with pytest.raises(SignatureRefused, match="signed for store"):
        signing.head("staging")


def test_no_channel_is_moved_to_a_version_that_is_not_trusted(
    signing: Store, stranger: Store
) -> None:
    prepare(parent=stranger.manifest(2), seed=7).publish(stranger)
    with pytest.raises(SignatureRefused, match=r"00000004.json cannot be trusted: it is not"):
        signing.promote(4, **WHO)
    assert signing.record_numbers("production") == [1, 2]


def test_who_must_sign_and_has_no_key_writes_nothing(held: MemoryObjects, keys: Keys) -> None:
    store = Store.create("models", objects=held, keys=Keys(trust=keys.trust))
    made = prepare()
    store.publish(made.draft, shards=made.shards, signer=keys.signer)
    with pytest.raises(KeyMissing, match="--sign-key KEYFILE"):
        store.promote(1, **WHO)
    with pytest.raises(KeyMissing):
        Jobs(held, keys=store.keys).ask(**WHO)
    assert not held.list("channels")
    assert not held.list("jobs")


def test_a_key_that_its_own_trust_file_does_not_name_is_wrong_usage(tmp_path: Path) -> None:
    bob = new_signer(tmp_path / "bob.pem")
    with pytest.raises(WrongUsage, match=f"keys trust NAME {bob.public}"):
        Keys(signer=bob, trust=Trust({}))


def test_a_history_of_strangers_only_offers_nothing_to_roll_back_to(
    held: MemoryObjects, keys: Keys
) -> None:
    open_store = Store.create("models", objects=held)
    for seed in (0, 1):
        made = prepare(seed=seed)
        open_store.publish(made.draft, shards=made.shards, signer=keys.signer)
        open_store.promote(seed + 1, **WHO)
    store = Store.open("models", objects=held, keys=keys)
    with pytest.raises(NothingToRollBack):
        store.rollback(to=None, **WHO)
    assert store.rollback(to=1, **WHO).target == 1


def test_verify_names_a_head_that_nobody_signed_and_any_signature_that_does_not_fit(
    held: MemoryObjects, signing: Store, stranger: Store, keys: Keys
) -> None:
    stranger.promote(1, **WHO)
    assert stranger.verify().ok
    (problem,) = stranger.verify(trust=keys.trust).problems
    assert problem.startswith("channels/production/00000003.json cannot be trusted: it is not sign")
    body = {**_body(held, record_name("production", 2)), "reason": "changed"}
    _plant(held, record_name("production", 2), body)
    (problem,) = stranger.verify().problems
    assert "00000002.json cannot be trusted: its signature does not fit it" in problem


# Jobs


def test_a_worker_with_keys_takes_only_jobs_that_are_signed(
    held: MemoryObjects, signing: Store, caplog: pytest.LogCaptureFixture
) -> None:
    forged = Jobs(held).ask(**WHO)
    trusting = Jobs(held, keys=signing.keys)
    for _ in range(3):
        assert trusting.claim_next(channel="production", worker="w") is None
    assert [one.getMessage() for one in caplog.records] == [
        f"job {forged.id} is skipped: {job_name(forged.id)} cannot be trusted: it is not "
        "signed, and signatures are required"
    ]
    mine = trusting.ask(**WHO)  # the forged one is not in the way
    claim = trusting.claim_next(channel="production", worker="w")
    assert claim is not None
    assert claim.job == mine.id


def test_a_signed_job_under_another_id_or_channel_is_refused(
    held: MemoryObjects, signing: Store
) -> None:
    jobs = Jobs(held, keys=signing.keys)
    made = jobs.ask(**WHO)
    body = _body(held, job_name(made.id))
    other = f"{made.id[:-12]}{'0' * 12}"
    _plant(held, job_name(other), dict(body))
    _plant(held, job_name(made.id), {**body, "channel": "staging"})
    assert jobs.claim_next(channel="production", worker="w") is None
    assert jobs.claim_next(channel="staging", worker="w") is None
    held.held.pop(job_name(other))
    with pytest.raises(JobNotFound):
        jobs.job(other)


def test_versions_that_a_stranger_notes_for_a_job_are_not_its_own(
    held: MemoryObjects, signing: Store
) -> None:
    jobs = Jobs(held, keys=signing.keys)
    jobs.ask(**WHO)
    claim = jobs.claim_next(channel="production", worker="w")
    assert claim is not None
    claim.made(2)
    _plant(held, made_name(claim.job, 3), {**_body(held, made_name(claim.job, 2)), "version": 3})
    assert claim.versions() == [2]
