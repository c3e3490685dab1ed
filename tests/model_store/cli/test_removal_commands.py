"""`delete` and `forget` tell what they would do, and ask where a person can answer."""

from __future__ import annotations

import json
import sys

import pytest

from model_store.cli.main import main
from model_store.store.store import Store

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pretend that a person sits at both ends."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    return monkeypatch


def shards(store: Store) -> set[str]:
    return {entry.name for entry in store.objects.list("shards")}


@pytest.mark.parametrize("arguments", [["delete", "1"], ["forget", "--class", "class-0a"]])
def test_a_dry_run_changes_nothing(store: Store, arguments: list[str], capsys: Capture) -> None:
    before = shards(store)
    at = ["--store", store.location]
    assert main([*arguments, "--dry-run", *at]) == 0
    assert "would be" in (out := capsys.readouterr().out)
    assert "nothing was changed" in out
    assert main([*arguments, "--dry-run", "--json", *at]) == 0
    assert json.loads(capsys.readouterr().out)["dry_run"] is True
    assert shards(store) == before
    assert store.versions() == [1, 2, 3]


def test_a_dry_run_names_what_forgetting_removes(store: Store, capsys: Capture) -> None:
    arguments = ["forget", "--class", "class-0a", "--store", store.location, "--json"]
    main([*arguments, "--dry-run"])
    planned = json.loads(capsys.readouterr().out)
    main(arguments)
    done = json.loads(capsys.readouterr().out)
    assert planned["shards"]
    assert {name: planned[name] for name in ("shards", "bytes", "versions")} == {
        name: done[name] for name in ("shards", "bytes", "versions")
    }


def test_a_dry_run_refuses_what_the_command_would_refuse(store: Store, capsys: Capture) -> None:
    assert main(["delete", "3", "--dry-run", "--store", store.location]) == 1
    assert "is what channel production names" in capsys.readouterr().err


@pytest.mark.parametrize("said", ["", "n", "nonsense", None])
def test_who_does_not_agree_loses_nothing(
    store: Store, terminal: pytest.MonkeyPatch, said: str | None
) -> None:
    def answer(question: str) -> str:
        if said is None:
            raise EOFError
        return said

    terminal.setattr("builtins.input", answer)
    before = shards(store)
    assert main(["delete", "1", "--store", store.location]) == 1
    assert main(["forget", "--class", "class-0a", "--store", store.location]) == 1
    assert store.versions() == [1, 2, 3]
    assert shards(store) == before


def test_who_agrees_or_says_so_before_is_obeyed(store: Store, terminal: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def agree(question: str) -> str:
        asked.append(question)
        return "y"

    terminal.setattr("builtins.input", agree)
    assert main(["delete", "1", "--store", store.location]) == 0
    assert "Delete version 1" in asked[0]
    assert main(["delete", "2", "--yes", "--store", store.location]) == 0
    assert len(asked) == 1
    assert store.versions() == [3]


def test_history_tells_who_moved_the_channel_and_why(store: Store, capsys: Capture) -> None:
    at = ["--store", store.location]
    main(["rollback", "--to", "1", "--reason", "too\x1b[31m red", *at])
    capsys.readouterr()
    assert main(["history", "--limit", "2", *at]) == 0
    out = capsys.readouterr().out
    assert "too\N{REPLACEMENT CHARACTER}[31m red" in out
    assert "the newest 2 of 4 records" in out
    assert main(["history", "--json", *at]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["target"] for one in found["records"]] == [1, 2, 3, 1]
    assert found["records"][-1]["mode"] == "pin"
    assert main(["history", "--channel", "other", *at]) == 1


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["lst"], "did you mean list?"),
        (["list", "--lmit", "3"], "did you mean --limit?"),
        (["keys", "trsut"], "did you mean trust?"),
        (["show", "1", "--xyzzy"], "lists all"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_nearest_in_one_line(
    arguments: list[str], hint: str, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert hint in err
    assert len(err.splitlines()) == 1
