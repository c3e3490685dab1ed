from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_store.cli.main import main
from model_store.records.signing import load_signer
from model_store.store.store import Store
from tests.model_store.commands import Capture, json_of
from tests.model_store.drafts import prepare


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _new(capsys: Capture, name: str) -> str:
    key: str = json_of(capsys, "keys", "new", f"{name}.pem")["key"]
    return key


def test_a_new_key_is_shown_trusted_and_distrusted(capsys: Capture) -> None:
    key = _new(capsys, "ann")
    assert json_of(capsys, "keys", "show", "ann.pem")["key"] == key
    trusted = json_of(capsys, "keys", "trust", "ann", key, "--trust", "trust.json")
    assert trusted["trusted"] == {"ann": key}
    gone = json_of(capsys, "keys", "distrust", "ann", "--trust", "trust.json")
    assert gone["trusted"] == {}


def test_the_list_says_who_signed_which_version(capsys: Capture, location: str) -> None:
    store = Store.open(location)
    ann, bob = _new(capsys, "ann"), _new(capsys, "bob")
    json_of(capsys, "keys", "trust", "ann", ann, "--trust", "trust.json")
    manifest = prepare().publish(store)
    for seed, name in enumerate(("ann.pem", "bob.pem"), start=1):
        prepared = prepare(parent=manifest, seed=seed)
        store.publish(prepared.draft, shards=prepared.shards, signer=load_signer(Path(name)))
    found = json_of(capsys, "keys", "list", "--trust", "trust.json", "--store", location)
    assert found["keys"] == [
        {"name": "ann", "key": ann, "versions": [2]},
        {"name": None, "key": bob, "versions": [3]},
    ]
    assert found["unsigned"] == [1]
    assert main(["keys", "list", "--trust", "trust.json", "--store", location]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["ann", ann, "2"] in rows
    assert ["(not", "trusted)", bob, "3"] in rows
    assert ["(not", "signed)", "-", "1"] in rows
    assert json_of(capsys, "show", "2", "--store", location)["signed_by"] == ann


def test_the_list_works_before_there_is_a_store(capsys: Capture) -> None:
    key = _new(capsys, "ann")
    json_of(capsys, "keys", "trust", "ann", key, "--trust", "trust.json")
    found = json_of(capsys, "keys", "list", "--trust", "trust.json")
    assert found["keys"] == [{"name": "ann", "key": key, "versions": []}]


def test_verify_requires_signatures_when_told(
    capsys: Capture, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(location)
    key = _new(capsys, "ann")
    monkeypatch.setenv("DNE_TRUST", "trust.json")
    json_of(capsys, "keys", "trust", "ann", key)
    prepared = prepare()
    store.publish(prepared.draft, shards=prepared.shards, signer=load_signer(Path("ann.pem")))
    assert main(["verify", "--store", location, "--require-signatures"]) == 0
    prepare(seed=1, task="other").publish(store)
    assert main(["verify", "--store", location]) == 0
    assert main(["verify", "--store", location, "--require-signatures"]) == 1
    assert "versions/00000002.json cannot be trusted: it is not signed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verify", "--require-signatures"], "no trust file is named"),
        (["keys", "trust", "ann", "0" * 64], "no trust file is named"),
        (["keys", "trust", "ann", "A" * 64, "--trust", "t"], "is not a public key"),
        (["keys", "trust", "a\nb", "0" * 64, "--trust", "t"], "printable"),
        (["keys", "distrust", "ann", "--trust", "t"], "cannot be read"),
        (["keys", "show", "none.pem"], "cannot be read"),
        (["keys", "list", "--trust", "none.json"], "cannot be read"),
    ],
)
def test_wrong_usage_is_a_sentence_and_2(
    arguments: list[str], says: str, capsys: Capture, tmp_path: Path
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert says in said
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_trusted_once_and_a_key_under_one_name(capsys: Capture) -> None:
    assert main(["keys", "trust", "ann", "0" * 64, "--trust", "t"]) == 0
    assert main(["keys", "trust", "ann", "1" * 64, "--trust", "t"]) == 2
    assert main(["keys", "trust", "bob", "0" * 64, "--trust", "t"]) == 2
    assert "same key" in capsys.readouterr().err
    assert json.loads(Path("t").read_text())["trusted"] == {"ann": "0" * 64}
