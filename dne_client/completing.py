"""Run `dne completion`: print the script that lets a shell complete the four commands."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping, Sequence

from model_store.command_line import Parser

PARSERS = {
    "train": "trainer.cli:build_parser",
    "store": "model_store.cli.main:build_parser",
    "serve": "dne_serve.cli:build_parser",
    "predict": "dne_client.predicting:parser",
    "demo": "dne_client.demo:parser",
    "completion": "dne_client.completing:parser",
}
"""The parsers of `dne`. They are imported here only: a machine with the client alone lacks most."""
SHELLS = ("bash", "zsh", "fish")
FILES = frozenset({"CERT", "DATA", "FILE", "KEYFILE", "LOG", "TRUST"})
FOLDERS = frozenset({"DIR", "FOLDER", "STORE"})


def main(arguments: Sequence[str] | None = None) -> int:
    print(script(parser().parse_args(arguments).shell))
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="dne completion",
        description="Prints a script that completes dne, dne-train, dne-store and dne-serve.",
        epilog='Load it in ~/.bashrc or ~/.zshrc with `eval "$(dne completion bash)"`, or in '
        "~/.config/fish/config.fish with `dne completion fish | source`.",
    )
    made.add_argument("shell", choices=SHELLS, help="the shell that is to load it")
    return made


def script(shell: str) -> str:
    import shtab

    return "\n".join(shtab.complete(parser, shell) for parser in _programs())


def _programs() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of `dne`, which has those of all commands, and those of the programs."""
    parsers: Mapping[str, Parser] = {name: _load(place) for name, place in PARSERS.items()}
    for made in parsers.values():
        _name_files(made)
    dne = Parser(prog="dne")
    commands = dne.add_subparsers()
    for name, made in parsers.items():
        commands.add_parser(name, parents=[made], add_help=False, help=made.description)
    yield dne
    yield from (made for made in parsers.values() if " " not in made.prog)


def _load(place: str) -> Parser:
    module, _, name = place.partition(":")
    made: Parser = getattr(importlib.import_module(module), name)()
    return made


def _name_files(parser: argparse.ArgumentParser) -> None:
    """Mark the options that take a file or a folder, by the word in their help."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _name_files(below)
        elif action.metavar in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
