"""The three commands explain themselves, and what the documents show exists."""

from __future__ import annotations

import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.project import COMMANDS, ROOT, help_of, options, subcommands

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "deploy/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
SHELL_BLOCK = re.compile(r"^```(?:sh|console|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SEPARATORS = frozenset({"|", "&&", "||", "&", ";"})
ASSIGNMENT = re.compile(r"[A-Z_]+=")
COMMON_OPTIONS = {"dne-train": {"--store", "--json"}, "dne-store": {"--store", "--json"}}


def invocations(text: str) -> list[list[str]]:
    """Every use of one of our commands in the shell blocks of a document."""
    found = []
    for block in SHELL_BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            for words in simple_commands(shlex.split(line, comments=True)):
                names = [word.rpartition("/")[2] for word in words]
                # `dne` is a word of other commands too; the longer names stand behind `docker run`.
                starts = (at for at, name in enumerate(names) if name in COMMANDS)
                found += [
                    [names[at], *words[at + 1 :]] for at in starts if at == 0 or "-" in names[at]
                ]
    return found


def simple_commands(words: list[str]) -> list[list[str]]:
    """Part a line at its pipes and the like, without variables in front and redirections behind."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word in SEPARATORS:
            parts.append([])
        elif parts[-1] or not ASSIGNMENT.match(word):
            parts[-1].append(word)
    return [part[: part.index(">")] if ">" in part else part for part in parts]


def unknown_words(invocation: list[str]) -> list[str]:
    """Subcommands and options of an invocation that the command does not have."""
    path, rest = invocation[:1], invocation[1:]
    while known := subcommands(*path):
        if rest[:1] == ["--help"]:
            return []
        if not rest or rest[0] not in known:
            return [" ".join([*path, *rest[:1]])]
        path, rest = [*path, rest[0]], rest[1:]
    given = {word.partition("=")[0] for word in rest if word.startswith("--")}
    return sorted(given - options(*path))


def every_command(*groups: str) -> list[tuple[str, ...]]:
    """The commands, their subcommands, and the subcommands of those."""
    found: list[tuple[str, ...]] = [(command,) for command in groups or COMMANDS]
    for path in found:  # it grows on the way
        found.extend((*path, sub) for sub in subcommands(*path))
    return found


def test_every_command_has_help_that_says_what_it_does() -> None:
    for path in every_command():
        text = help_of(*path)
        description = text.split("\n\n")[1]
        assert not description.startswith(("options:", "positional arguments:")), (
            f"{' '.join(path)} --help has no description"
        )


def test_every_option_has_help() -> None:
    for path in every_command():
        lines = help_of(*path).partition("options:")[2].splitlines()
        bare = [
            line
            for line, after in zip(lines, [*lines[1:], ""], strict=True)
            if re.match(r"  -\S", line)
            and not re.search(r"\S {2,}\S", line[2:])
            and not after.startswith(" " * 20)
        ]
        assert bare == [], f"{' '.join(path)}: {bare}"


def test_the_documented_commands_exist() -> None:
    assert {"add-task", "evaluate"} <= set(subcommands("dne-train"))
    assert {
        "list", "show", "diff", "verify", "promote", "rollback", "resume", "export-onnx",
    } <= set(subcommands("dne-store"))  # fmt: skip
    assert {
        "--store", "--host", "--port", "--channel", "--backend", "--device",
    } <= options("dne-serve")  # fmt: skip


def test_train_and_store_commands_take_a_store_and_json() -> None:
    for command, common in COMMON_OPTIONS.items():
        for path in every_command(command):
            if not subcommands(*path):
                # A key and a trust file are in no store, and a list of backbones is of none.
                apart = path[1:2] in (("keys",), ("backbones",))
                needed = common - {"--store"} if apart else common
                assert needed <= options(*path), " ".join(path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_shows_exists(document: Path) -> None:
    wrong = {
        shlex.join(invocation): words
        for invocation in invocations(document.read_text())
        if (words := unknown_words(invocation))
    }
    assert wrong == {}


def test_the_documents_show_all_commands() -> None:
    shown = {one[0] for document in DOCUMENTS for one in invocations(document.read_text())}
    assert shown == set(COMMANDS)


def test_wrong_examples_are_noticed() -> None:
    text = (
        "```sh\nDNE_STORE=x .venv/bin/dne-store roll-back --to 1 && dne-serve --prot 1 | cat\n```\n"
    )
    assert [unknown_words(one) for one in invocations(text)] == [
        ["dne-store roll-back"],
        ["--prot"],
    ]


@pytest.mark.parametrize(
    "command",
    [
        "from trainer.cli import main; main(['add-task', '--data', 'nothere'])",
        "from dne_client.predicting import main; main(['README.md', '--url', 'http://127.0.0.1:9'])",
    ],
)
def test_what_cannot_begin_is_refused_before_much_is_imported(command: str) -> None:
    """At most 0.4 s of processor time, the least of three: a person has mistyped a path."""
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert b"error: " in done.stderr
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.4
