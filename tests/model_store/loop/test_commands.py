from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_store.backends.local import LocalDirectory
from model_store.cli.main import main
from model_store.loop.inbox import Inbox
from tests.model_store.loop.items import add_item, picture_bytes


@pytest.fixture
def inbox(location: str) -> Inbox:
    return Inbox(LocalDirectory(Path(location)))


class Command:
    def __init__(self, location: str, output: pytest.CaptureFixture[str]) -> None:
        self.location = location
        self.output = output

    def __call__(self, *words: str, code: int = 0) -> str:
        """Run `dne-store inbox` and return what it prints."""
        assert main(["inbox", *words, "--store", self.location]) == code
        found = self.output.readouterr()
        return found.out if code == 0 else found.err


@pytest.fixture
def command(location: str, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(location, capsys)


def test_items_are_listed_shown_labelled_and_exported(
    command: Command, inbox: Inbox, tmp_path: Path
) -> None:
    items = [add_item(inbox, str(n), minutes=n) for n in range(4)]
    listed = json.loads(command("list", "--json", "--limit", "3"))
    assert [one["id"] for one in listed["items"]] == items[:0:-1]
    assert listed["total"] == 4
    assert listed["counts"]["unlabelled"] == 4
    rest = json.loads(command("list", "--json", "--cursor", listed["next_cursor"]))
    assert [one["id"] for one in rest["items"]] == items[:1]
    assert rest["next_cursor"] is None
    command("label", items[0], "mug", items[1], "<script>")
    command("discard", items[2])
    shown = json.loads(command("show", items[0], "--json"))
    assert (shown["state"], shown["number"], shown["judgement"]["label"]) == ("labelled", 1, "mug")
    assert [one["label"] for one in shown["history"]] == ["mug"]
    exported = json.loads(command("export", "--out", str(tmp_path / "out"), "--json"))
    assert exported["classes"] == {"<script>": 1, "mug": 1}
    assert exported["items"] == {items[0]: 1, items[1]: 1}
    found = {str(one.relative_to(tmp_path / "out")) for one in (tmp_path / "out").glob("*/*")}
    assert found == {f"mug/{items[0]}.png", f"<script>/{items[1]}.png"}
    assert (tmp_path / "out/mug" / f"{items[0]}.png").read_bytes() == picture_bytes("0")


def test_people_read_a_table(command: Command, inbox: Inbox) -> None:
    item = add_item(inbox, "1")
    assert "1 item: 1 unlabelled" in command("list")
    assert "mug (record 1)" in command("label", item, "mug")
    assert "(wrong)" in command("wrong", item)
    assert "(clear)" in command("clear", item)
    text = command("show", item)
    assert "cat 50.0 %" in text
    assert "(clear)" in text
    assert "more: --cursor" not in command("list", "--state", "unlabelled", "--order", "uncertain")
    assert "1 item deleted" in command("delete", item)
    assert "0 items" in command("list")


def test_wrong_usage_changes_nothing(command: Command, inbox: Inbox, tmp_path: Path) -> None:
    item = add_item(inbox, "1")
    assert "has no label" in command("label", item, "mug", item, code=2)
    assert "cannot name a folder" in command("label", item, "a/b", code=2)
    absent = "20261117t120000000-000000000000"
    assert "there is no item" in command("label", item, "mug", absent, "mug", code=1)
    assert "there is no item" in command("delete", item, absent, code=1)
    assert "there is no item" in command("show", "..", code=1)
    assert "no item of the inbox has a label" in command(
        "export", "--out", str(tmp_path / "out"), code=1
    )
    assert inbox.history(item) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    command("label", item, "mug")
    assert "name a new one" in command("export", "--out", str(tmp_path / "full"), code=2)
