from __future__ import annotations

import json

import pytest

from model_store.cli.main import main
from model_store.layout import shard_name
from model_store.maintenance.forget import delete_version
from model_store.store.store import Store
from tests.model_store.commands import Capture, json_of, text_of
from tests.model_store.drafts import prepare, publish_lineage


@pytest.fixture
def store(location: str) -> Store:
    """Versions 1 and 2, and a branch 3 that is in no channel."""
    store = Store.open(location)
    publish_lineage(store, 2)
    prepare(parent=store.manifest(1), seed=7).publish(store)
    return store


def test_storage_shows_what_each_version_costs(store: Store, capsys: Capture) -> None:
    found = json_of(capsys, "storage", "--store", store.location)
    assert [row["version"] for row in found["versions"]] == [1, 2, 3]
    assert all(row["total"] == row["shared"] + row["own"] for row in found["versions"])
    assert found["unnamed"] == 0
    text = text_of(capsys, "storage", "--store", store.location)
    assert text.splitlines()[0].split() == [
        "version", "total", "delta", "shared", "own", "images"
    ]  # fmt: skip


def test_delete_and_then_gc_in_two_runs(store: Store, capsys: Capture) -> None:
    where = ("--store", store.location)
    own = json_of(capsys, "storage", *where)["versions"][2]["own"]
    deleted = json_of(capsys, "delete", "3", "--reason", "bad labels", *where)
    assert (deleted["version"], deleted["reason"]) == (3, "bad labels")
    dry = json_of(capsys, "gc", *where)
    assert (dry["dry_run"], dry["condemned_bytes"], dry["deleted"]) == (True, own, [])
    assert json_of(capsys, "gc", *where) == dry
    first = json_of(capsys, "gc", "--sweep", *where)
    assert (first["condemned"], first["deleted"]) == (dry["condemned"], [])
    assert json_of(capsys, "gc", "--sweep", *where)["waiting_bytes"] == own
    last = json_of(capsys, "gc", "--sweep", "--grace", "0", *where)
    assert sorted(last["deleted"]) == sorted(dry["condemned"])
    assert last["deleted_bytes"] == own
    assert json_of(capsys, "storage", *where)["unnamed"] == 0
    assert main(["verify", *where]) == 0


def test_what_gc_says_to_people(store: Store, capsys: Capture) -> None:
    delete_version(store, 3, actor="a", reason="")
    text = text_of(capsys, "gc", "--store", store.location)
    assert "would be condemned: shards/" in text
    assert "nothing was changed" in text
    text = text_of(capsys, "gc", "--sweep", "--store", store.location)
    assert "would" not in text
    assert "condemned: shards/" in text


def test_a_version_that_a_channel_names_is_refused(store: Store, capsys: Capture) -> None:
    assert main(["delete", "2", "--store", store.location]) == 1
    assert "channel production names" in capsys.readouterr().err


def test_list_and_show_after_a_deletion(store: Store, capsys: Capture) -> None:
    where = ("--store", store.location)
    store.promote(3, channel="production", actor="a", reason="")
    child = prepare(parent=store.manifest(3), seed=9).publish(store)
    store.promote(child.version, channel="production", actor="a", reason="")
    delete_version(store, 3, actor="a", reason="")
    rows = json_of(capsys, "list", *where)["versions"]
    assert [row["version"] for row in rows] == [1, 2, 4]
    # Against the nearest ancestor that is there, and that has the first expert.
    assert rows[2]["delta_bytes"] == rows[2]["total_bytes"] - child.experts[0].bytes
    assert json_of(capsys, "show", "4", *where)["delta_bytes"] == rows[2]["delta_bytes"]
    assert main(["show", "3", *where]) == 1
    assert "version 3 was deleted" in capsys.readouterr().err


def test_forget_says_what_it_cannot_undo(store: Store, capsys: Capture) -> None:
    where = ("--store", store.location)
    found = json_of(capsys, "forget", "--class", "class-0a", *where)
    assert found["versions"] == [1, 2, 3]
    assert any("weights" in what for what in found["not_undone"])
    assert not [n for n in found["shards"] if shard_name(n) in _names(store)]
    text = text_of(capsys, "forget", "--class", "class-0b", *where)
    assert "gone from versions 1, 2, 3" in text
    assert "weights" in text
    assert main(["verify", *where]) == 0
    assert main(["forget", "--class", "nobody", *where]) == 1


def test_copy_to_another_store_and_again(
    store: Store, tmp_path_factory: pytest.TempPathFactory, capsys: Capture
) -> None:
    target = str(tmp_path_factory.mktemp("other") / "models")
    assert main(["copy", "--store", store.location, "--to", target, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    assert len(captured.out.splitlines()) == 1
    assert found["versions"] == [1, 2, 3]
    assert captured.err  # the bar
    assert main(["verify", "--store", target]) == 0
    capsys.readouterr()
    text = text_of(capsys, "copy", "--store", store.location, "--to", target)
    assert "0 versions, 0 shards (0 B)" in text


@pytest.mark.parametrize(
    "arguments",
    [["delete"], ["delete", "0"], ["copy"], ["forget"], ["gc", "--grace", "-1"],
     ["gc", "--grace", "nan"], ["gc", "--grace", "soon"]],
)  # fmt: skip
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def _names(store: Store) -> set[str]:
    return {entry.name for entry in store.objects.list("shards")}
