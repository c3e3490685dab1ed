"""A server that requires signatures: it serves what is signed by someone trusted, and says why
it does not serve the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dne_serve.settings import load_settings
from model_store.errors import WrongUsage
from model_store.records.manifest import Manifest
from model_store.records.signing import Signer, Trust, new_signer, save_trust
from model_store.store.store import Store
from tests.live_server import Live, assert_problem, live_server, png, wait_for
from tests.tiny_versions import promote, publish_tiny


@pytest.fixture
def ann(tmp_path: Path) -> Signer:
    return new_signer(tmp_path / "ann.pem")


@pytest.fixture
def signed(store: Store, ann: Signer) -> Manifest:
    """Version 1, signed and promoted."""
    return promote(store, publish_tiny(store, signer=ann))


@pytest.fixture
def strict(store: Store, signed: Manifest, ann: Signer, tmp_path: Path) -> Iterator[Live]:
    save_trust(tmp_path / "trust.json", Trust({"ann": ann.public}))
    trust = tmp_path / "trust.json"
    with live_server(Path(store.location), require_signatures=True, trust=trust) as live:
        live.wait_until_ready()
        yield live


def _wait_for_refusal(live: Live, *, says: str) -> None:
    wait_for(lambda: says in (live.http.get("/readyz").json()["error"] or ""))
    assert live.http.get("/readyz").json()["version"] == 1
    assert live.predict(png()).json()["version"] == 1
    assert live.metric("dne_following") == 0


def test_an_unsigned_or_foreign_version_is_refused_and_the_old_one_goes_on(
    strict: Live, store: Store, signed: Manifest, ann: Signer, tmp_path: Path
) -> None:
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
    strict: Live, store: Store, signed: Manifest
) -> None:
    publish_tiny(store, tasks=[("digits", ["0"])], parent=signed, seed=1)
    assert_problem(strict.admin("/promote", to=2), 503, says="it is not signed")


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
        load_settings(require_signatures=True).read_trust()
    with pytest.raises(WrongUsage, match="cannot be read"):
        load_settings(require_signatures=True, trust=str(tmp_path / "none")).read_trust()
    assert load_settings().read_trust() is None


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
