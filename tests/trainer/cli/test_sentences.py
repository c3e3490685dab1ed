import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.command import Command
from trainer.cli import build_parser
from trainer.cli.requests import SETTINGS, with_options

NOT_OPTIONS = {
    *("actor", "before_publish", "command", "effort", "keys", "limits", "measures_threads"),
    *("on_published", "shape", "signer", "tokens", "file", "grows_by_itself"),
}
"""Fields of requests that no option sets, or whose parts are options."""


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("`skip_bad` goes on without them", "--skip-bad goes on without them"),
        ("`memory=statistics` is for", "--memory statistics is for"),
        ("`quick=True` and `quick=False` do", "--quick and --no-quick do"),
        ("use `data=m/train` `val_data=m/val`", "use --data m/train --val-data m/val"),
        ("`dne-store promote 2` and `puma: cat`", "`dne-store promote 2` and `puma: cat`"),
        ("`zebra` is not a setting", "`zebra` is not a setting"),
    ],
)
def test_settings_are_told_as_options(sentence: str, told: str) -> None:
    assert with_options(sentence) == told


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of all parsers below it."""
    for action in parser._actions:
        yield action
        for below in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from actions_of(below)


def test_each_setting_has_an_option_of_its_name() -> None:
    options = {option for action in actions_of(build_parser()) for option in action.option_strings}
    named = {f"--{name.replace('_', '-')}" for name in SETTINGS - NOT_OPTIONS}
    assert named <= options | {"--promote"}


def test_data_that_is_not_there_is_told_before_torch_is_imported(
    dne_train: Command, tmp_path: Path
) -> None:
    assert dne_train("add-task", "--data", tmp_path / "nothere") == 2
    assert dne_train.err == f"error: --data {tmp_path / 'nothere'} does not exist\n"
    code = (
        "import sys\nfrom trainer.cli import main\n"
        "code = main(['add-task', '--data', 'nothere', '--store', 'models'])\n"
        "sys.exit(9 if {'torch', 'numpy'} & set(sys.modules) else code)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2, "error: --data nothere does not exist\n")
