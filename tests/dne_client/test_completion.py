"""The shells complete the commands: each test types into a real bash, zsh or fish."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dne_client import __main__ as command
from dne_client.__main__ import SHELLS, completion_script

END = "«end»"
# Ctrl-T shows the line as it stands, so that a test can tell what the shell has written into it.
SET_UP = {
    "bash": """bind -x '"\\C-t": printf "<%s>{end}\\n" "$READLINE_LINE"'\n""",
    "zsh": "fpath=($PWD $fpath); autoload -U compinit && compinit -D -u\n"
    "line() {{ print -r -- \"<$BUFFER>{end}\" }}; zle -N line; bindkey '^T' line\n",
}
START = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
COMPLETED = {
    "dne st": "dne store ",
    "dne store rollb": "dne store rollback ",
    "dne-store rollb": "dne-store rollback ",
    "dne store keys tr": "dne store keys trust ",
    "dne-train add-task --quick --preset sm": "dne-train add-task --quick --preset small ",
    "dne train add-task --quick --skip": "dne train add-task --quick --skip-bad ",
    "dne store rollback --reason why --c": "dne store rollback --reason why --channel ",
    "dne-serve --backend o": "dne-serve --backend onnx ",
    "dne predict holi": "dne predict holiday/",
    "dne predict holiday/ph": "dne predict holiday/photo.jpg ",
    "dne store show --store mod": "dne store show --store models/",
    "dne completion zs": "dne completion zsh ",
    "dne store nothing-like-it": "dne store nothing-like-it",
}


class Terminal:
    """A shell behind a pseudo-terminal, with the script loaded."""

    def __init__(self, shell: str, folder: Path, *, load: str) -> None:
        self.process, self.at = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            os.execvpe(START[shell][0], START[shell], {**os.environ, "PS1": "", "TERM": "dumb"})
        (folder / "set-up").write_text(SET_UP[shell].format(end=END) + load)
        self.type(f". ./set-up; printf 'ready%s\\n' {END}\n")
        self.read_until(f"ready{END}")

    def completed(self, line: str) -> str:
        """Type a line and a tabulator; return the line that the shell makes of them."""
        self.type(f"{line}\t\x14")
        shown = self.read_until(END)
        self.type("\x15")  # empties the line
        found = re.findall("<([^<>]*)>$", shown.replace("\r", "").removesuffix(END))
        assert found, shown
        return str(found[0])

    def type(self, text: str) -> None:
        os.write(self.at, text.encode())

    def read_until(self, text: str) -> str:
        shown, ends = b"", time.monotonic() + 30
        while text.encode() not in shown:
            assert time.monotonic() < ends, shown.decode(errors="replace")
            if select.select([self.at], [], [], 0.2)[0]:
                shown += os.read(self.at, 65536)
        return shown.decode().partition(text)[0] + text

    def close(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.at)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "holiday").mkdir()
    (tmp_path / "holiday/photo.jpg").touch()
    (tmp_path / "models").mkdir()
    (tmp_path / "models.txt").touch()  # a file is not offered where a folder is meant
    return tmp_path


def shell_or_skip(shell: str) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell.upper()} DID NOT COMPLETE: it is not installed")
    return shell


@pytest.fixture(params=["bash", "zsh"])
def terminal(request: pytest.FixtureRequest, folder: Path) -> Iterator[Terminal]:
    shell = shell_or_skip(request.param)
    (folder / "script").write_text(completion_script(shell))
    opened = Terminal(shell, folder, load='eval "$(cat script)"\n')
    yield opened
    opened.close()


def test_a_tabulator_completes_the_line(terminal: Terminal) -> None:
    assert {line: terminal.completed(line) for line in COMPLETED} == COMPLETED


def fish(line: str, folder: Path) -> dict[str, str]:
    """Ask fish for all completions of a line, each with its meaning."""
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source ./script; complete -C '{line}'"],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    rows = [row.partition("\t") for row in done.stdout.splitlines()]
    return {word: meaning for word, _, meaning in rows}


def test_fish_completes_each_line(folder: Path) -> None:
    (folder / "script").write_text(completion_script(shell_or_skip("fish")))
    for line, whole in COMPLETED.items():
        last = whole.rstrip().rpartition(" ")[2]
        expected = [] if whole == line else [last]
        assert list(fish(line, folder)) == expected, line
    assert list(fish("dne ", folder)) == list(command.COMMANDS)


@pytest.mark.parametrize("shell", SHELLS)
def test_dne_completion_prints_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    checked = subprocess.run(
        [shell_or_skip(shell), "-n"], input=printed, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["completion", "tcsh"])
    assert "choose from bash, zsh, fish" in capsys.readouterr().err.replace("'", "")
