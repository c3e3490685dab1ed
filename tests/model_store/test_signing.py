from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model_store.errors import RecordInvalid, SignatureRefused, WrongUsage
from model_store.layout import version_name
from model_store.records.manifest import Manifest, decode, encode, reseal
from model_store.records.quality import Calibration, Gate
from model_store.records.sealing import canonical, seal
from model_store.records.signing import (
    Signer,
    Trust,
    check_signature,
    load_signer,
    load_trust,
    new_signer,
    save_trust,
)
from model_store.store.store import Store
from tests.model_store.backends import MemoryObjects, WatchedObjects
from tests.model_store.drafts import prepare
from tests.model_store.form_1 import changed, with_form_1


@pytest.fixture
def bob(tmp_path: Path) -> Signer:
    return new_signer(tmp_path / "bob.pem")


@pytest.fixture
def trust(ann: Signer) -> Trust:
    return Trust({"ann": ann.public})


STORE = "0" * 32
OTHER = "f" * 32


def _signed(
    signer: Signer | None, *, version: int = 1, store: str = STORE, gate: Gate | None = None
) -> Manifest:
    draft = prepare().draft
    draft = draft.model_copy(update={"metrics": draft.metrics.model_copy(update={"gate": gate})})
    sealed = encode(draft, version=version, store=store, signer=signer)
    return decode("x", sealed, version=version)


def test_a_published_version_names_its_signer(store: Store, ann: Signer, trust: Trust) -> None:
    prepared = prepare()
    manifest = store.publish(prepared.draft, shards=prepared.shards, signer=ann)
    assert trust.check(manifest, store=store.id) == "ann"
    assert trust.check(store.manifest(1), store=store.id) == "ann"
    assert store.verify(trust=trust).problems == ()


def test_the_signature_is_that_of_the_documented_bytes(ann: Signer) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    body = json.loads(encode(prepare().draft, version=1, store=STORE, signer=ann))
    signature = body.pop("signature")
    del body["digest"]
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["key"]))
    signed = {"kind": "manifest", "record": body, "store": STORE}
    message = b"dne-serve signature 2\n" + canonical(signed)
    key.verify(bytes.fromhex(signature["value"]), message)


def test_the_signature_of_an_unsigned_manifest_is_null() -> None:
    body = json.loads(encode(prepare().draft, version=1))
    assert body.pop("signature") is None
    del body["digest"]
    with pytest.raises(RecordInvalid, match="spelt in another way"):
        decode("x", seal(body), version=1)


def test_a_version_that_lost_the_race_for_its_number_is_signed_under_the_next(
    ann: Signer, trust: Trust
) -> None:
    def overtake(verb: str, name: str) -> None:
        if (verb, name) == ("create", version_name(1)) and not rival.versions():
            prepare(seed=9).publish(rival)

    held = MemoryObjects()
    rival = Store.create("models", objects=held)
    store = Store.open("models", objects=WatchedObjects(held, before=overtake))
    prepared = prepare()
    manifest = store.publish(prepared.draft, shards=prepared.shards, signer=ann)
    assert manifest.version == 2
    assert trust.check(manifest, store=store.id) == "ann"


def test_unsigned_is_refused_where_signatures_are_required(trust: Trust) -> None:
    with pytest.raises(SignatureRefused, match="it is not signed"):
        trust.check(_signed(None), store=STORE)


def test_a_key_that_is_not_trusted_is_refused_and_named(trust: Trust, bob: Signer) -> None:
    with pytest.raises(SignatureRefused, match=bob.public):
        trust.check(_signed(bob), store=STORE)


@pytest.mark.parametrize(
    "members",
    [
        {"version": 2},
        {"transaction": "0" * 32},
        {"calibration": Calibration(temperature=9.0).model_dump()},
        {"unknown": {"score": "max-logit", "threshold": 9.0, "rate": 0.05, "images": 9}},
        {"created": "2030-01-01T00:00:00Z"},
    ],
)
def test_whatever_is_changed_after_signing_is_refused(
    ann: Signer, trust: Trust, members: dict[str, Any]
) -> None:
    with pytest.raises(SignatureRefused, match="does not fit"):
        trust.check(changed(_signed(ann), **members), store=STORE)


def test_a_trusted_key_over_another_ones_signature_is_refused(
    ann: Signer, bob: Signer, trust: Trust
) -> None:
    forged = _signed(bob).signature
    assert forged is not None
    signature = {**forged.model_dump(), "key": ann.public}
    with pytest.raises(SignatureRefused, match="does not fit"):
        trust.check(changed(_signed(bob), signature=signature), store=STORE)


def test_a_signature_for_another_purpose_is_none_for_a_manifest(ann: Signer, trust: Trust) -> None:
    body = json.loads(encode(prepare().draft, version=1))
    del body["digest"]
    bare = ann.sign(body, kind="channel", store=STORE).model_dump()
    manifest = decode("x", seal({**body, "signature": bare}), version=1)
    with pytest.raises(SignatureRefused, match="does not fit"):
        trust.check(manifest, store=STORE)


def test_a_signature_for_another_store_is_refused(ann: Signer, trust: Trust) -> None:
    with pytest.raises(SignatureRefused, match=f"signed for store {OTHER}.*copy --to STORE --sign"):
        trust.check(_signed(ann, store=OTHER), store=STORE)


def test_a_signature_that_claims_another_store_than_it_was_made_for_does_not_fit(
    ann: Signer, trust: Trust
) -> None:
    made = _signed(ann, store=OTHER)
    assert made.signature is not None
    moved = changed(made, signature={**made.signature.model_dump(), "store": STORE})
    with pytest.raises(SignatureRefused, match="does not fit"):
        trust.check(moved, store=STORE)


def test_a_signature_of_form_1_fits_and_is_refused_where_signatures_are_required(
    ann: Signer, trust: Trust, tmp_path: Path
) -> None:
    old = with_form_1(_signed(None), tmp_path / "ann.pem")
    check_signature(old, name="x")
    with pytest.raises(SignatureRefused, match=r"form 1, which fits any store.*copy --to STORE"):
        trust.check(old, store=STORE)


def test_a_version_that_the_gate_refused_is_published_without_a_signature(
    store: Store, ann: Signer
) -> None:
    prepared = prepare()
    metrics = prepared.draft.metrics.model_copy(
        update={"gate": Gate(passed=False, reasons=("it got worse",))}
    )
    draft = prepared.draft.model_copy(update={"metrics": metrics})
    assert store.publish(draft, shards=prepared.shards, signer=ann).signature is None


def test_a_signed_version_that_the_gate_refused_is_trusted_only_if_it_was_forced(
    ann: Signer, trust: Trust
) -> None:
    refused = Gate(passed=False, reasons=("it got worse",))
    with pytest.raises(SignatureRefused, match="the gate refused it, and nobody forced it"):
        trust.check(_signed(ann, gate=refused), store=STORE)
    forced = _signed(ann, gate=refused.model_copy(update={"forced": True}))
    assert trust.check(forced, store=STORE) == "ann"


def test_verify_notices_a_signature_that_does_not_fit_whoever_is_trusted(
    ann: Signer, trust: Trust
) -> None:
    held = MemoryObjects()
    store = Store.create("models", objects=held)
    prepared = prepare()
    manifest = store.publish(prepared.draft, shards=prepared.shards, signer=ann)
    held.held[version_name(1)] = reseal(changed(manifest, transaction="0" * 32))
    assert [problem for problem in store.verify().problems if "does not fit" in problem]


def test_verify_with_trust_names_every_version_that_nobody_signed(
    ann: Signer, trust: Trust, store: Store
) -> None:
    first = prepare().publish(store)
    second = prepare(parent=first, seed=1)
    store.publish(second.draft, shards=second.shards, signer=ann)
    assert store.verify().ok
    (problem,) = store.verify(trust=trust).problems
    assert problem.startswith(version_name(1))
    assert store.verify(2, trust=trust).ok  # its own signature covers what it inherits


# Key files


def test_a_key_file_is_for_its_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    made = new_signer(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(WrongUsage, match="never overwritten"):
        new_signer(path)
    assert load_signer(path).public == made.public


def test_two_keys_are_never_the_same(ann: Signer, bob: Signer) -> None:
    assert ann.public != bob.public


def _encrypted() -> bytes:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes(
        s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"x")
    )


def _elliptic() -> bytes:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no private key"),
        (b"\x00" * 100, "no private key"),
        (b" " * (1 << 21), "larger than"),
        (_encrypted(), "encrypted"),
        (_elliptic(), "not an Ed25519 key"),
    ],
)
def test_what_is_no_key_file_is_wrong_usage(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "key.pem").write_bytes(content)
    with pytest.raises(WrongUsage, match=says):
        load_signer(tmp_path / "key.pem")


def test_a_key_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="cannot be read"):
        load_signer(tmp_path / "key.pem")
    os.mkdir(tmp_path / "folder")
    with pytest.raises(WrongUsage, match="cannot be read"):
        load_signer(tmp_path / "folder")


# Trust files


def test_a_trust_file_comes_back_as_it_was_saved(tmp_path: Path, ann: Signer, bob: Signer) -> None:
    path = tmp_path / "trust.json"
    for trust in (Trust({"ann": ann.public}), Trust({"ann": ann.public, "Böb": bob.public})):
        save_trust(path, trust)
        assert load_trust(path) == trust
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ann.pem", "bob.pem", "trust.json"]


KEY = "0" * 64


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "format|trusted"),
        ('{"format":2,"trusted":{}}', "format"),
        ('{"format":1,"trusted":{},"more":1}', "more"),
        ('{"format":1,"trusted":{"ann":"KEY"}}', "trusted.ann"),
        (f'{{"format":1,"trusted":{{"ann":"{KEY}","ann":"{"1" * 64}"}}}}', "is repeated"),
        (f'{{"format":1,"trusted":{{"ann":"{KEY}","bob":"{KEY}"}}}}', "same key"),
        (f'{{"format":1,"trusted":{{"a\\nb":"{KEY}"}}}}', "printable"),
        ('{"format":1,"trusted":' + '{"a":' * 5000, "not JSON"),
    ],
)
def test_a_trust_file_that_makes_no_sense_is_wrong_usage(
    tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "trust.json").write_text(text)
    with pytest.raises(WrongUsage, match=says):
        load_trust(tmp_path / "trust.json")


def test_requiring_signatures_without_a_trust_file_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="--trust FILE"):
        load_trust(None)
    with pytest.raises(WrongUsage, match="cannot be read"):
        load_trust(tmp_path / "none.json")


@pytest.mark.long
def test_a_command_that_signs_nothing_does_not_load_cryptography(location: str) -> None:
    prepare().publish(Store.open(location))
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from model_store.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    for command in ("list", "verify"):
        done = subprocess.run(
            [sys.executable, "-c", program, command, "--store", location],
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
