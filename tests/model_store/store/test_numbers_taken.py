"""What has a number already and is no version or record: it stops writers, and they say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_store.cli.main import main
from model_store.errors import WriteFailed
from model_store.store.store import Store
from tests.model_store.drafts import publish_lineage
from trainer.base import base_of
from trainer.request import AddTask

LAST = "99999999.json"


@pytest.fixture
def location(tmp_path: Path) -> Path:
    publish_lineage(Store.create(str(tmp_path / "models")), 2)
    return tmp_path / "models"


def _plant(location: Path, name: str) -> None:
    junk = location / name
    junk.parent.mkdir(exist_ok=True)
    junk.write_text("junk")


@pytest.mark.parametrize("name", [f"versions/{LAST}", f"deleted/{LAST}"])
def test_a_publish_names_what_has_the_last_number_and_writes_nothing(
    location: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _plant(location, name)
    before = sorted(location.rglob("*.safetensors"))
    old = Store.open(str(location)).manifest(2).classes[0]
    assert main(["rename-class", old, "another", "--store", str(location)]) == 1
    told = capsys.readouterr().err
    assert f"{name} has the last number" in told
    assert "move it out of the store" in told
    assert sorted(location.rglob("*.safetensors")) == before
    (location / name).unlink()
    assert main(["rename-class", old, "another", "--store", str(location)]) == 0


def test_a_task_is_refused_before_it_is_learnt(location: Path, tmp_path: Path) -> None:
    _plant(location, f"versions/{LAST}")
    with pytest.raises(WriteFailed, match=f"versions/{LAST} has the last number"):
        base_of(AddTask(store=str(location), data=tmp_path))


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("channels/production/00000003.json", ["promote", "1", "--no-verify"]),
        ("versions/00000003.json", ["rename-class", "CLASS", "another"]),
    ],
)
def test_a_folder_under_the_next_name_is_told_by_the_writer_and_by_verify(
    location: Path,
    name: str,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("channel", "publish"):
        monkeypatch.setattr(f"model_store.store.{module}.MAX_CONFLICTS", 3)
    (location / name).mkdir()
    known = Store.open(str(location)).manifest(2).classes[0]
    given = [known if part == "CLASS" else part for part in command]
    assert main([*given, "--store", str(location)]) == 1
    assert f"{name} is in the way" in capsys.readouterr().err
    assert main(["verify", "--store", str(location)]) == 1
    told = f"bad: {name} is in the way of the next one: it is not a regular file; move it away"
    assert told in capsys.readouterr().out
