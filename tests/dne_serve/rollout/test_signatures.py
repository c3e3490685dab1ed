"""A server that requires signatures: it serves what is signed by someone trusted, and says why
it does not serve the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dne_serve.server import worker_command_of
from dne_serve.settings import load_settings
from model_store.errors import KeyMissing, WrongUsage
from model_store.layout import record_name
from model_store.loop.jobs import Jobs
from model_store.records.manifest import Manifest
from model_store.records.signing import NO_KEYS, Keys, Signer, Trust, new_signer, save_trust
from model_store.store.store import Store
from tests.live_server import Live, assert_problem, live_server, png, wait_for
from tests.tiny_versions import promote, publish_tiny


@pytest.fixture
def ann(tmp_path: Path) -> Signer:
    return new_signer(tmp_path / "ann.pem")


@pytest.fixture
def signing(store: Store, ann: Signer) -> Store:
    """The store, whose channel records ann signs."""
    return Store.open(store.location, keys=Keys(signer=ann))


@pytest.fixture
def signed(signing: Store, ann: Signer) -> Manifest:
    """Version 1, signed and promoted."""
    return promote(signing, publish_tiny(signing, signer=ann))


@pytest.fixture
def required(ann: Signer, tmp_path: Path) -> dict[str, Any]:
    save_trust(tmp_path / "trust.json", Trust({"ann": ann.public}))
    return {"require_signatures": True, "trust": tmp_path / "trust.json"}


@pytest.fixture
def strict(store: Store, signed: Manifest, required: dict[str, Any]) -> Iterator[Live]:
    with live_server(Path(store.location), **required) as live:
        live.wait_until_ready()
        yield live


@pytest.fixture
def keyed(
    store: Store, signed: Manifest, required: dict[str, Any], tmp_path: Path
) -> Iterator[Live]:
    with live_server(Path(store.location), **required, sign_key=tmp_path / "ann.pem") as live:
        live.wait_until_ready()
        yield live


def _wait_for_refusal(live: Live, *, says: str) -> None:
    wait_for(lambda: says in (live.http.get("/readyz").json()["error"] or ""))
    assert live.http.get("/readyz").json()["version"] == 1
    assert live.predict(png()).json()["version"] == 1
    assert live.metric("dne_following") == 0


def test_an_unsigned_or_foreign_version_is_refused_and_the_old_one_goes_on(
    strict: Live, signing: Store, signed: Manifest, ann: Signer, tmp_path: Path
) -> None:
    store = signing
    assert strict.http.get("/readyz").json()["error"] is None
    digits = [("digits", ["0", "1"])]
    promote(store, publish_tiny(store, tasks=digits, parent=signed, seed=1))
    _wait_for_refusal(strict, says="versions/00000002.json cannot be trusted: it is not signed")
    mallory = new_signer(tmp_path / "mallory.pem")
    promote(store, publish_tiny(store, tasks=digits, parent=signed, seed=2, signer=mallory))
    _wait_for_refusal(strict, says=f"key {mallory.public}, which is not trusted")
    promote(store, publish_tiny(store, tasks=digits, parent=signed, seed=3, signer=ann))
    strict.wait_until_serving(4)
    assert strict.http.get("/readyz").json()["error"] is None
    assert strict.http.get("/versions/4").json()["signed_by"] == ann.public


def test_asking_for_an_unsigned_version_by_its_number_is_refused_too(
    strict: Live, store: Store, signed: Manifest
) -> None:
    publish_tiny(store, tasks=[("digits", ["0"])], parent=signed, seed=1)
    assert_problem(strict.predict(png(), query="?version=2"), 503, says="it is not signed")
    assert_problem(strict.predict(png(), query="?version=2"), 503, says="it is not signed")


def test_promoting_an_unsigned_version_says_that_it_is_not_served(
    keyed: Live, store: Store, signed: Manifest
) -> None:
    publish_tiny(store, tasks=[("digits", ["0"])], parent=signed, seed=1)
    assert_problem(keyed.admin("/promote", to=2), 503, says="it is not signed")


def test_a_record_that_nobody_signed_is_not_followed_whatever_it_names(
    strict: Live, store: Store, signing: Store, signed: Manifest, ann: Signer
) -> None:
    second = publish_tiny(store, tasks=[("digits", ["0"])], parent=signed, seed=1, signer=ann)
    promote(store, second)
    _wait_for_refusal(strict, says="channels/production/00000002.json cannot be trusted: it is not")
    (problem,) = strict.http.get("/versions").json()["problems"]
    assert "00000002.json cannot be trusted" in problem
    promote(signing, second)
    strict.wait_until_serving(2)


def test_records_that_vanish_do_not_take_a_running_server_back(
    strict: Live, store: Store, signing: Store, signed: Manifest, ann: Signer
) -> None:
    tasks = [("digits", ["0"])]
    promote(signing, publish_tiny(store, tasks=tasks, parent=signed, seed=1, signer=ann))
    strict.wait_until_serving(2)
    store.objects.delete(record_name("production", 2))
    wait_for(lambda: "went back" in (strict.http.get("/readyz").json()["error"] or ""), seconds=60)
    assert strict.predict(png()).json()["version"] == 2


def test_a_server_without_a_key_writes_no_record_and_names_the_next_step(
    strict: Live, store: Store, signed: Manifest, ann: Signer
) -> None:
    publish_tiny(store, tasks=[("digits", ["0"])], parent=signed, seed=1, signer=ann)
    moves: dict[str, Any] = {"/promote": {"to": 2}, "/rollback": {"to": 1}, "/resume": {}}
    for path, body in moves.items():
        assert_problem(strict.admin(path, **body), 409, says="--sign-key KEYFILE")
    assert store.record_numbers("production") == [1]
    assert "has no key" in strict.http.get("/versions").json()["moves_refused"]
    with pytest.raises(KeyMissing):
        jobs_of(strict).ask(channel="production", actor="a", reason="")


def test_a_server_with_a_key_signs_its_moves_and_jobs_and_follows_them(
    keyed: Live, store: Store, signed: Manifest, ann: Signer
) -> None:
    publish_tiny(store, tasks=[("digits", ["0"])], parent=signed, seed=1, signer=ann)
    moves: dict[str, Any] = {"/promote": {"to": 2}, "/rollback": {}, "/resume": {}}
    for path, body in moves.items():
        answer = keyed.admin(path, **body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["record"]["signature"]["key"] == ann.public
    assert keyed.http.get("/readyz").json()["version"] == 2
    assert keyed.http.get("/versions").json()["problems"] == []
    job = jobs_of(keyed).ask(channel="production", actor="a", reason="")
    assert job.signature is not None


def jobs_of(live: Live) -> Jobs:
    store = live.serving.open_store()
    return Jobs(store.objects, keys=store.keys)


@pytest.mark.parametrize("writes", [{"guard": "errors>1%"}, {"with_trainer": True}])
def test_a_part_that_writes_needs_a_key_where_signatures_are_required(
    writes: dict[str, Any], required: dict[str, Any]
) -> None:
    with pytest.raises(WrongUsage, match="give sign_key too"):
        load_settings(**required, **writes)
    load_settings(**required, **writes, sign_key="ann.pem")


def test_the_worker_beside_a_server_gets_its_key_and_its_trust_file(
    keyed: Live, store: Store, required: dict[str, Any], tmp_path: Path
) -> None:
    settings = load_settings(
        store=store.location, with_trainer=True, sign_key=tmp_path / "ann.pem", **required
    )
    command = worker_command_of(settings)
    assert command[-2:] == [f"--sign={tmp_path / 'ann.pem'}", f"--trust={required['trust']}"]
    assert "--sign" not in "".join(worker_command_of(load_settings(sign_key="a.pem")))


def test_a_key_that_the_trust_file_does_not_name_stops_the_start(
    required: dict[str, Any], tmp_path: Path
) -> None:
    new_signer(tmp_path / "bob.pem")
    with pytest.raises(WrongUsage, match="keys trust NAME"):
        load_settings(**required, sign_key=tmp_path / "bob.pem").read_keys()


def test_a_store_of_unsigned_versions_never_becomes_ready(
    store: Store, letters: Manifest, tmp_path: Path
) -> None:
    save_trust(tmp_path / "trust.json", Trust({}))
    trust = tmp_path / "trust.json"
    with live_server(Path(store.location), require_signatures=True, trust=trust) as live:
        wait_for(lambda: "it is not signed" in live.http.get("/readyz").text)
        assert_problem(live.http.get("/readyz"), 503, says="it is not signed")
        assert live.predict(png()).status_code == 503


def test_without_the_setting_signatures_do_not_matter(store: Store, letters: Manifest) -> None:
    with live_server(Path(store.location)) as live:
        live.wait_until_serving(1)


def test_requiring_signatures_needs_a_trust_file(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="no trust file is named"):
        load_settings(require_signatures=True).read_keys()
    with pytest.raises(WrongUsage, match="cannot be read"):
        load_settings(require_signatures=True, trust=str(tmp_path / "none")).read_keys()
    assert load_settings(sign_key="none.pem", trust="none.json").read_keys() == NO_KEYS


def test_the_environment_requires_signatures_and_an_argument_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dne_serve.cli import build_parser

    monkeypatch.setenv("DNE_REQUIRE_SIGNATURES", "true")
    monkeypatch.setenv("DNE_TRUST", "trust.json")
    assert load_settings().require_signatures
    assert load_settings().trust == Path("trust.json")
    given = vars(build_parser().parse_args(["--no-require-signatures"]))
    given.pop("json")
    assert not load_settings(**given).require_signatures
