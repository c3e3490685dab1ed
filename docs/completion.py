"""Write the words that shells complete, from the parsers of the commands.

python -m docs.completion

The scripts beside the words are written by hand. Parsers of the trainer, the store and the server
need libraries that a machine with the client alone does not have, so the words are a file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from dne_client.__main__ import COMMANDS
from dne_client.completing import WORDS
from dne_client.completing import parser as completion_parser
from dne_client.demo.story import parser as demo_parser
from dne_client.predicting import parser as predict_parser
from dne_serve.cli import build_parser as serve_parser
from dne_serve.settings import Settings
from model_store.cli.main import build_parser as store_parser
from trainer.cli import parser as train_parser

LONGEST = 72
"""Characters of a meaning at most: the screens of people are not wider than that beside a word."""
FILES = frozenset({"CERT", "DATA", "FILE", "KEYFILE", "LOG", "TRUST"})
FOLDERS = frozenset({"DIR", "FOLDER", "STORE"})


def words() -> str:
    """Return all lines: PATH|WORD|KIND|MEANING."""
    return "".join(f"{line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    parsers = {
        "train": train_parser(),
        "store": store_parser(),
        "serve": serve_parser(),
        "predict": predict_parser(),
        "demo": demo_parser(),
        "completion": completion_parser(),
    }
    for name, meaning in COMMANDS.items():
        yield _line("", name, "command", meaning)
    yield _line("", "--help", "switch", "show the commands and end")
    yield _line("", "--version", "switch", "print the software's version and end")
    for name in COMMANDS:
        yield from _lines_of(parsers[name], name)


def _lines_of(parser: argparse.ArgumentParser, path: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action._choices_actions:
                yield _line(path, one.dest, "command", one.help or "")
            for name, below in action.choices.items():
                yield from _lines_of(below, f"{path} {name}")
            continue
        meaning = (action.help or "") % vars(action)
        for word in [one for one in action.option_strings if one.startswith("--")]:
            yield _line(path, word, _kind(action, path), meaning)
        if not action.option_strings:
            yield _line(path, "*", _kind(action, path), meaning)


def _kind(action: argparse.Action, path: str) -> str:
    if action.nargs == 0:
        return "switch"
    choices = action.choices or (_choices_of_setting(action.dest) if path == "serve" else ())
    if choices:
        return "=" + " ".join(map(str, choices))
    if action.metavar in FOLDERS:
        return "folder"
    pem = action.option_strings == ["--tls-key"]  # elsewhere KEY is a public key in digits
    return "file" if action.metavar in FILES or pem else "value"


def _choices_of_setting(name: str) -> tuple[str, ...]:
    field = Settings.model_fields.get(name)
    literal = field is not None and get_origin(field.annotation) is Literal
    return get_args(field.annotation) if field is not None and literal else ()


def _line(path: str, word: str, kind: str, meaning: str) -> str:
    short = meaning.partition("; ")[0].replace("|", "/")
    if "(" in short and ")" not in short:
        short = short.partition(" (")[0]
    if len(short) > LONGEST:
        short = short[: LONGEST - 1].rpartition(" ")[0] + "…"
    return f"{path}|{word}|{kind}|{short}"


if __name__ == "__main__":
    WORDS.write_text(words())
