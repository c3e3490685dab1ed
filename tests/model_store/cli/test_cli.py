from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model_store import __version__
from model_store.cli.main import build_parser, main
from model_store.layout import shard_name, version_name
from model_store.records.describe import verdict
from model_store.records.quality import Gate
from model_store.store.store import Store
from tests.model_store.commands import Capture, json_of, text_of
from tests.model_store.drafts import prepare

COMMANDS = [
    *("list", "show", "diff", "verify", "promote", "rollback", "resume", "history"),
    "export-onnx",
    *("retire-class", "rename-class", "storage", "gc", "delete", "forget", "copy", "mend-channel"),
    *("bundle", "unbundle", "threshold", "relabel", "init", "borrowers"),
]


# The command line itself


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "--store" in out
    assert "--json" in out


def test_every_command_and_every_option_has_a_help_text() -> None:
    commands = _subparsers(build_parser())
    assert sorted(commands.choices) == sorted([*COMMANDS, "keys", "inbox"])
    keys = _subparsers(commands.choices["keys"])
    assert sorted(keys.choices) == ["distrust", "list", "new", "show", "trust"]
    inbox = _subparsers(commands.choices["inbox"])
    assert sorted(inbox.choices) == sorted(
        ["clear", "delete", "discard", "export", "label", "list", "show", "wrong"]
    )
    for group in (commands, keys, inbox):
        assert all(choice.help for choice in group._choices_actions)
        for parser in group.choices.values():
            assert all(action.help for action in parser._actions if action.dest != "==SUPPRESS==")


def _subparsers(parser: argparse.ArgumentParser) -> Any:
    (found,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["show"],
        ["show", "x"],
        ["show", "0"],
        ["diff", "1"],
        ["promote"],
        ["rollback", "--to", "-1"],
        ["rollback", "--channel", "../x"],
        ["export-onnx", "1"],
        ["list", "--no-such-option"],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_the_version_of_the_software(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dne-store {__version__}\n"


@pytest.mark.parametrize("command", ["list", "verify", "rollback"])
def test_where_there_is_no_store_the_command_fails_and_makes_none(
    command: str, tmp_path: Path, capsys: Capture
) -> None:
    assert main([command, "--store", str(tmp_path / "none")]) == 1
    assert "there is no store at" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_a_file_is_wrong_usage(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert main(["list", "--store", str(tmp_path / "file")]) == 2
    assert "is not a directory" in capsys.readouterr().err


# Looking


def test_list_as_json(store: Store, capsys: Capture) -> None:
    store.rollback(channel="production", to=2, actor="a", reason="")
    found = json_of(capsys, "list", "--store", store.location)
    assert [row["version"] for row in found["versions"]] == [1, 2, 3]
    assert [row["parent"] for row in found["versions"]] == [None, 1, 2]
    assert set(found["versions"][0]) == {
        "version", "parent", "created", "tasks", "classes", "accuracy", "delta_bytes",
        "total_bytes", "change", "gate", "verdict", "reasons",
    }  # fmt: skip
    last = found["versions"][2]
    assert (last["tasks"], last["classes"]) == (3, 6)
    assert last["accuracy"] == {"all": 0.5, "old": None, "new": None, "parent_old": None}
    assert 0 < last["delta_bytes"] < last["total_bytes"]
    assert found["channels"] == {"production": {"target": 2, "mode": "pin", "number": 4}}


def test_list_as_a_table(store: Store, capsys: Capture) -> None:
    title, first, second, third = text_of(capsys, "list", "--store", store.location).splitlines()
    assert title.split()[:5] == ["version", "parent", "created", "what", "tasks"]
    assert "learnt task-1" in second
    assert [line.split()[0] for line in (first, second, third)] == ["1", "2", "3"]
    assert third.endswith("production (follow)")
    assert "production" not in first
    assert "50.0 %" in second


def test_list_of_an_empty_store_says_how_to_begin(location: str, capsys: Capture) -> None:
    assert "dne-train add-task" in text_of(capsys, "list", "--store", location)


def test_list_goes_on_past_a_damaged_manifest_and_fails(store: Store, capsys: Capture) -> None:
    (Path(store.location) / version_name(2)).write_bytes(b"{}")
    assert main(["list", "--store", store.location, "--json"]) == 1
    out, err = capsys.readouterr()
    assert [row["version"] for row in json.loads(out)["versions"]] == [1, 3]
    assert version_name(2) in err


def test_show_as_json(store: Store, capsys: Capture) -> None:
    manifest = store.manifest(2)
    found = json_of(capsys, "show", "2", "--store", store.location)
    assert (found["version"], found["parent"]) == (2, 1)
    assert found["tasks"][1] == {
        "name": "task-1",
        "classes": ["class-1a", "class-1b"],
        "heads": 2,
    }
    assert found["classes"] == list(manifest.spec.classes)
    assert {(ref["kind"], ref["sha256"], ref["bytes"]) for ref in found["shards"]} == {
        (ref.kind, ref.sha256, ref.bytes) for ref in manifest.shards
    }
    assert found["metrics"]["accuracy"]["all"] == 0.5
    assert found["digest"] == manifest.digest
    assert found["transaction"] == manifest.transaction
    assert found["created"] == manifest.created
    assert found["delta_bytes"] < found["total_bytes"]
    assert found["memory_bytes"] == sum(ref.bytes for ref in manifest.image_shards)


def test_show_as_text(store: Store, capsys: Capture) -> None:
    text = text_of(capsys, "show", "3", "--store", store.location)
    assert "task-2" in text
    assert "class-0a, class-0b" in text
    assert "classifier  1      " in text  # a line a kind, and no digest of a shard
    assert store.manifest(3).classifier.sha256 not in text
    assert "`dne-store show 3 --json` lists them with their SHA-256" in text


@pytest.mark.parametrize(
    ("gate", "line"),
    [
        (None, "not judged"),
        (Gate(passed=True), "passed"),
        (Gate(passed=False, reasons=("it fell", "it is slow")), "refused: it fell; it is slow"),
        (Gate(passed=False, forced=True, reasons=("it fell",)), "overruled: it fell"),
    ],
)
def test_show_says_what_the_gate_said(store: Store, gate: Gate | None, line: str) -> None:
    manifest = store.manifest(1)
    metrics = manifest.metrics.model_copy(update={"gate": gate})
    assert verdict(manifest.model_copy(update={"metrics": metrics})) == line


def test_show_of_a_version_that_does_not_exist(store: Store, capsys: Capture) -> None:
    assert main(["show", "9", "--store", store.location]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: there is no version 9; the newest is 3\n"


def test_diff_as_json(store: Store, capsys: Capture) -> None:
    found = json_of(capsys, "diff", "1", "2", "--store", store.location)
    assert found["tasks"] == {"added": ["task-1"], "removed": []}
    assert found["classes"] == {"added": ["class-1a", "class-1b"], "removed": []}
    assert [ref["kind"] for ref in found["shards"]["added"]] == [
        "expert", "classifier", "memory", "memory"
    ]  # fmt: skip
    assert [ref["kind"] for ref in found["shards"]["removed"]] == ["classifier"]
    assert found["added_bytes"] == sum(ref["bytes"] for ref in found["shards"]["added"])
    assert found["metrics"]["per_class"]["class-1a"] == {"from": None, "to": 0.25}


def test_diff_is_the_other_way_round_when_asked_the_other_way_round(
    store: Store, capsys: Capture
) -> None:
    there = json_of(capsys, "diff", "1", "3", "--store", store.location)
    back = json_of(capsys, "diff", "3", "1", "--store", store.location)
    for what in ("tasks", "classes", "shards"):
        assert there[what]["added"] == back[what]["removed"]
        assert there[what]["removed"] == back[what]["added"]


def test_diff_as_text(store: Store, capsys: Capture) -> None:
    better = prepare(parent=store.manifest(3), accuracy=0.75, seed=8).publish(store)
    text = text_of(capsys, "diff", "3", str(better.version), "--store", store.location)
    assert "+ tasks: task-3" in text
    assert "- classifier" in text
    assert "accuracy all: 50.0 % → 75.0 %" in text


def test_verify_of_an_intact_store(store: Store, capsys: Capture) -> None:
    found = json_of(capsys, "verify", "--store", store.location)
    assert (found["ok"], found["problems"], found["versions"]) == (True, [], 3)
    assert "no problem" in text_of(capsys, "verify", "2", "--store", store.location)


def test_verify_names_the_shard_with_a_flipped_bit(store: Store, capsys: Capture) -> None:
    sha256 = store.manifest(2).classifier.sha256
    path = Path(store.location) / shard_name(sha256)
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    assert main(["verify", "--store", store.location]) == 1
    assert sha256 in capsys.readouterr().out
    assert main(["verify", "--store", store.location, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert sha256 in found["problems"][0]
    assert main(["verify", "1", "--store", store.location]) == 0


# Moving


def test_rollback_and_resume_as_json(store: Store, capsys: Capture) -> None:
    back = json_of(capsys, "rollback", "--reason", "too eager", "--store", store.location)
    assert set(back) == {
        "channel", "number", "target", "mode", "previous", "actor", "reason", "time"
    }  # fmt: skip
    assert (back["target"], back["mode"], back["previous"]) == (2, "pin", 3)
    assert (back["channel"], back["number"], back["reason"]) == ("production", 4, "too eager")
    assert "@" in back["actor"]
    on = json_of(capsys, "resume", "--store", store.location)
    assert (on["target"], on["mode"], on["previous"]) == (3, "follow", 2)


@pytest.mark.parametrize("damage", ["flipped", "missing", "cut short"])
@pytest.mark.parametrize("kind", ["expert", "classifier"])
def test_promote_reads_what_would_be_served_and_refuses_what_is_damaged(
    store: Store, kind: str, damage: str, capsys: Capture
) -> None:
    sha256 = next(ref.sha256 for ref in store.manifest(2).model_shards if ref.kind == kind)
    path = Path(store.location) / shard_name(sha256)
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    match damage:
        case "flipped":
            path.write_bytes(data)
        case "missing":
            path.unlink()
        case _:
            path.write_bytes(data[:-4])
    assert main(["promote", "2", "--store", store.location]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"version 2 was not promoted: shard {sha256} is" in err
    assert "--no-verify" in err
    assert len(store.history("production")) == 3
    assert main(["promote", "2", "--no-verify", "--store", store.location]) == 0
    assert len(store.history("production")) == 4


def test_promote_minds_only_what_a_server_reads(store: Store, capsys: Capture) -> None:
    (Path(store.location) / shard_name(store.manifest(2).memory[0].shard.sha256)).unlink()
    assert json_of(capsys, "promote", "2", "--store", store.location)["target"] == 2


def test_a_rollback_is_not_kept_waiting_by_reading_shards(store: Store, capsys: Capture) -> None:
    (Path(store.location) / shard_name(store.manifest(1).classifier.sha256)).unlink()
    assert json_of(capsys, "rollback", "--to", "1", "--store", store.location)["target"] == 1


def test_promote_can_begin_a_channel(store: Store, capsys: Capture) -> None:
    found = json_of(capsys, "promote", "2", "--channel", "staging", "--store", store.location)
    assert (found["channel"], found["number"], found["previous"]) == ("staging", 1, None)
    assert store.channels() == ["production", "staging"]


def test_a_move_to_what_is_named_already_is_recorded_and_said(
    store: Store, capsys: Capture
) -> None:
    text = text_of(capsys, "rollback", "--to", "3", "--store", store.location)
    assert "names version 3 (pin); it did so before" in text
    assert len(store.history("production")) == 4


def test_a_move_says_what_was_named_before(store: Store, capsys: Capture) -> None:
    text = text_of(
        capsys, "rollback", "--to", "1", "--reason", "bad\x1b[2J", "--store", store.location
    )
    assert "names version 1 (pin); before: version 3" in text
    assert "\x1b" not in text
    fresh = text_of(capsys, "promote", "1", "--channel", "new", "--store", store.location)
    assert "before: nothing" in fresh


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["rollback", "--to", "9"], "there is no version 9; the newest is 3"),
        (["promote", "9"], "there is no version 9; the newest is 3"),
        (["resume"], "the channel is not rolled back; there is nothing to resume"),
        (["rollback", "--channel", "none"], "channel none names no version yet"),
    ],
)
def test_a_move_that_cannot_be_made_changes_nothing(
    store: Store, arguments: list[str], sentence: str, capsys: Capture
) -> None:
    assert main([*arguments, "--store", store.location]) == 1
    assert sentence in capsys.readouterr().err
    assert len(store.history("production")) == 3
    assert store.channels() == ["production"]


def test_a_damaged_record_does_not_hide_that_the_next_one_was_written(
    store: Store, capsys: Capture
) -> None:
    (Path(store.location) / "channels/production/00000003.json").write_bytes(b"{}")
    found = json_of(capsys, "rollback", "--to", "1", "--store", store.location)
    assert (found["target"], found["previous"]) == (1, None)


# Starting


def test_export_onnx_says_where_the_graph_is_and_what_was_written(
    store: Store, tmp_path: Path, capsys: Capture
) -> None:
    told = []
    for version, precision in (("2", "fp32"), ("3", "fp32"), ("3", "int8")):
        where = ["--out", str(tmp_path / "onnx"), "--precision", precision]
        assert main(["export-onnx", version, *where, "--store", store.location, "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    first, second, small = told
    assert first["written_bytes"] == first["bytes"]
    assert second["written_bytes"] < second["bytes"]
    assert Path(second["path"]).name == "version-00000003.onnx"
    assert Path(small["path"]).name == "version-00000003.int8.onnx"


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["verify"], ["show", "1"], ["promote", "2"], ["rollback", "--to", "1"]],
)
def test_no_command_but_export_imports_torch_or_numpy(store: Store, arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from model_store.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'numpy', 'onnx', 'PIL', 'rich', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments, "--store", store.location],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
