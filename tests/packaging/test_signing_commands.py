"""Every command that signs asks whom it may build on, and signs nothing on top of anything else."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from model_store.loop.jobs import Jobs
from model_store.records.quality import Gate
from model_store.records.signing import Keys, Trust, load_signer, new_signer, save_trust
from model_store.store.store import Store
from tests.packaging.project import COMMANDS, MAINS, options, subcommands
from tests.tiny_versions import publish_tiny

ARGUMENTS = {
    ("dne-train", "add-task"): ("--data", "."),
    ("dne-train", "deepen"): (),
    ("dne-train", "worker"): ("--once",),
    ("dne-store", "promote"): ("1",),
    ("dne-store", "rollback"): ("--to", "1"),
    ("dne-store", "resume"): (),
    ("dne-store", "retire-class"): ("a",),
    ("dne-store", "rename-class"): ("a", "c"),
    ("dne-store", "threshold"): ("a", "0.3"),
}
"""Arguments with which a command would sign something in the stores below."""
SIGNS_WITHOUT_TRUST = {("dne-store", "copy"), ("dne-store", "unbundle")}
"""`--sign` of these is how a person signs a store that has no signatures."""


def run(command: tuple[str, str], *arguments: object) -> int:
    name, subcommand = command
    given = [subcommand, *ARGUMENTS[command], *map(str, arguments)]
    code: int = importlib.import_module(MAINS[name]).main(given)
    return code


@pytest.fixture
def key(tmp_path: Path) -> Path:
    new_signer(tmp_path / "ann.pem")
    return tmp_path / "ann.pem"


@pytest.fixture
def trust(tmp_path: Path, key: Path) -> Path:
    save_trust(tmp_path / "trust.json", Trust({"ann": load_signer(key).public}))
    return tmp_path / "trust.json"


def test_all_commands_that_sign_are_tried_here() -> None:
    found = {
        (command, name)
        for command in COMMANDS
        for name in subcommands(command)
        if "--sign" in options(command, name)
    }
    assert found == ARGUMENTS.keys() | SIGNS_WITHOUT_TRUST


@pytest.mark.parametrize("command", ARGUMENTS, ids="-".join)
def test_a_key_without_a_trust_file_is_wrong_usage(
    command: tuple[str, str],
    key: Path,
    trust: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DNE_TRUST", raising=False)
    at = ("--store", tmp_path / "models")
    Store.create(str(tmp_path / "models"))
    assert run(command, *at, "--sign", key) == 2
    assert "--sign needs --trust FILE or DNE_TRUST" in capsys.readouterr().err
    assert run(command, *at, "--trust", trust) == 2
    assert "give --sign KEYFILE too" in capsys.readouterr().err


def unsigned(store: Store, folder: Path) -> None:
    publish_tiny(store)


def signed_by_another(store: Store, folder: Path) -> None:
    publish_tiny(store, signer=new_signer(folder / "mallory.pem"))


def signed_for_another_store(store: Store, folder: Path) -> None:
    other = Store.create(str(folder / "other"))
    publish_tiny(other, signer=load_signer(folder / "ann.pem"))
    for kind in ("versions", "shards"):
        for name in other.objects.list_names(kind):
            store.objects.create(name, other.objects.read(name, max_bytes=1 << 30))


def refused_by_the_gate(store: Store, folder: Path) -> None:
    gate = Gate(passed=False, reasons=("it got worse",))
    publish_tiny(store, signer=load_signer(folder / "ann.pem"), gate=gate)


PARENTS: tuple[Callable[[Store, Path], None], ...] = (
    unsigned,
    signed_by_another,
    signed_for_another_store,
    refused_by_the_gate,
)


@pytest.mark.parametrize("plant", PARENTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("command", ARGUMENTS, ids="-".join)
def test_nothing_is_signed_on_top_of_a_version_that_is_not_trusted(
    command: tuple[str, str],
    plant: Callable[[Store, Path], None],
    key: Path,
    trust: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The records of the channel and the job are signed by someone who did not look."""
    store = Store.create(str(tmp_path / "models"), keys=Keys(signer=load_signer(key)))
    plant(store, tmp_path)
    _name(store)
    job = Jobs(store.objects, keys=store.keys).ask(channel="production", actor="a", reason="").id
    code = run(command, "--store", store.location, "--sign", key, "--trust", trust)
    end = Jobs(store.objects).job(job).end
    told = end.reason if end else capsys.readouterr().err
    assert "versions/00000001.json cannot be trusted" in told
    assert code == (0 if command[1] == "worker" else 1)
    assert store.versions() == [1]
    assert store.record_numbers("production") == [1, 2]


@pytest.mark.parametrize("command", ARGUMENTS, ids="-".join)
def test_nothing_is_signed_on_the_word_of_a_channel_that_is_not_trusted(
    command: tuple[str, str], key: Path, trust: Path, tmp_path: Path
) -> None:
    """The version is signed. A stranger has let the channel name it, and asks for learning."""
    store = Store.create(str(tmp_path / "models"))
    publish_tiny(store, signer=load_signer(key))
    _name(store)
    job = Jobs(store.objects).ask(channel="production", actor="mallory", reason="").id
    code = run(command, "--store", store.location, "--sign", key, "--trust", trust)
    named_by_a_person = command[1] in ("promote", "rollback")
    assert code == (0 if named_by_a_person or command[1] == "worker" else 1)
    assert store.versions() == [1]
    assert store.record_numbers("production") == ([1, 2, 3] if named_by_a_person else [1, 2])
    assert Jobs(store.objects).state(job).claim == 0


def _name(store: Store) -> None:
    """Promote version 1, and pin the channel to it."""
    store.promote(1, channel="production", actor="mallory", reason="")
    store.rollback(to=1, channel="production", actor="mallory", reason="")
