"""A child process that dies says why, in a few printable words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from model_store.host.children import KEPT_BYTES, StderrTail, end_of, ending, last_line, last_words
from tests.packaging.project import ROOT

WITHOUT_STDERR = re.compile(r"stderr=(subprocess\.)?DEVNULL")


def test_the_last_words_are_one_printable_line() -> None:
    said = b"Traceback:\r\n  File 5\n\n\x1b]0;owned\x07TypeError: \xff\xe2\x80\xaeno\n"
    assert last_words(said) == "Traceback: | File 5 | ]0;owned TypeError: \ufffd no"
    assert last_words(said).isprintable()
    assert last_line(said) == "]0;owned TypeError: \ufffd no"
    assert last_words(b"") == last_line("\n \n") == ""


def test_the_last_words_are_few(tmp_path: Path) -> None:
    noise = b"a complaint\n" * (1 << 16)
    (tmp_path / "said").write_bytes(noise + b"the end")
    assert len(last_words(noise)) <= 2 * KEPT_BYTES
    assert len(last_line("x" * 10_000)) <= 300
    assert last_line(end_of(tmp_path / "said")) == "the end"


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (1, b"OSError: no\n", "ended with 1: OSError: no"),
        (3, b"", "ended with 3"),
        (-4, b"", "was ended by SIGILL"),
        (-35, b"", "was ended by signal 35"),
    ],
)
def test_an_end_is_told_with_its_reason(code: int, said: bytes, told: str) -> None:
    assert ending(code, said) == told


def test_a_child_that_complains_without_end_never_waits_for_a_reader() -> None:
    script = (
        "import sys\nfor _ in range(9000): print('x' * 99, file=sys.stderr)\nraise OSError('no')"
    )
    child = subprocess.Popen([sys.executable, "-S", "-c", script], stderr=subprocess.PIPE)
    said = StderrTail(child.stderr)
    assert child.wait(timeout=60) == 1
    said.join(60)
    assert len(said.kept) <= KEPT_BYTES
    assert last_line(said.kept) == "OSError: no"


def test_no_child_of_the_product_speaks_to_nobody() -> None:
    """Walk all places that start processes: none of them throws stderr away."""
    packages = ("dne_serve", "model_store", "trainer", "dne_client")
    files = [path for one in packages for path in (ROOT / one).rglob("*.py")]
    silent = [path.name for path in files if WITHOUT_STDERR.search(path.read_text())]
    assert silent == []
