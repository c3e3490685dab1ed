from __future__ import annotations

import argparse
import getpass
import json
import os
import subprocess
import sys

import pytest

from model_store.cli.command import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    add_channel_option,
    add_store_option,
    current_actor,
    print_json,
    run,
    version_number,
)
from model_store.errors import DataRejected, ShardMissing, SpecInvalid, WrongUsage


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WrongUsage("that makes no sense"), EXIT_USAGE),
        (SpecInvalid("that cannot be built"), EXIT_USAGE),
        (DataRejected("too few images"), EXIT_FAILED),
        (ShardMissing("0" * 64), EXIT_FAILED),
        (PermissionError(13, "Permission denied", "out"), EXIT_FAILED),
        (KeyboardInterrupt(), EXIT_FAILED),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise error

    assert run(main) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_the_exit_code_of_the_command_is_kept() -> None:
    assert run(lambda: EXIT_OK) == EXIT_OK
    assert run(lambda: 3) == 3


def test_a_fault_of_ours_is_not_dressed_up() -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 // 0)


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": "é\n", "n": 1})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"name": "é\n", "n": 1}


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "./models"), ("", "./models"), ("/srv/models", "/srv/models")]
)
def test_the_store_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: str
) -> None:
    if value is None:
        monkeypatch.delenv("DNE_STORE", raising=False)
    else:
        monkeypatch.setenv("DNE_STORE", value)
    parser = argparse.ArgumentParser()
    add_store_option(parser)
    assert parser.parse_args([]).store == expected
    assert parser.parse_args(["--store", "here"]).store == "here"


def test_a_channel_with_a_strange_name_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_channel_option(parser)
    assert parser.parse_args([]).channel == "production"
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--channel", "../x"])
    assert ended.value.code == EXIT_USAGE
    assert "is not a channel name" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1.5", "²", "١", "100000000", " 1"])
def test_what_is_no_version_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        version_number(text)


def test_the_actor_is_user_at_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    assert current_actor() == f"ann@{os.uname().nodename}"


def test_a_user_without_a_name_still_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert current_actor().startswith(f"uid-{os.getuid()}@")


def test_a_reader_that_goes_away_causes_no_traceback() -> None:
    script = (
        "import sys\n"
        "from model_store.cli.command import run\n"
        "sys.exit(run(lambda: print('x' * 10_000_000) or 0))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == EXIT_FAILED
