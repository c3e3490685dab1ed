"""dne: one command over dne-train, dne-store and dne-serve, and commands for the shell."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution

from dne_client import predicting
from model_store.command_line import Parser

EXIT_FAILED = 1
EXIT_USAGE = 2
PARTS = {
    "train": "dne-train",
    "store": "dne-store",
    "serve": "dne-serve",
}
COMMANDS = {
    "train": "learn tasks, evaluate versions and report on them (dne-train)",
    "store": "list, promote, roll back and look after versions (dne-store)",
    "serve": "serve the version that a channel names (dne-serve)",
    "predict": "ask a running server about images",
    "models": "list the models of a running server with many",
    "demo": "learn, serve and roll back handwritten digits, in two to three minutes",
    "completion": "print what lets bash, zsh or fish complete these commands",
}


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        code = _main(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (`| head`). Python's own flush at the end must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code


def build_parser() -> Parser:
    """Build the parser of the first word. What follows it is for the command."""
    parser = Parser(
        prog="dne",
        description="Teaches, keeps, serves and asks a classifier that grows. Each command has "
        "--help.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"dne {_version()}",
        help="print the software's version and end",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, meaning in COMMANDS.items():
        commands.add_parser(name, help=meaning, add_help=False)
    return parser


def _main(given: Sequence[str]) -> int:
    parser = build_parser()
    if not given or given[0] == "help":
        parser.print_help()
        return 0 if given else EXIT_USAGE
    name = parser.parse_args(given[:1]).command
    if name in PARTS:
        return _run_part(PARTS[name], given[1:])
    own = {
        "predict": predicting.main,
        "models": predicting.list_models,
        "completion": _completion,
        "demo": _demo,
    }
    return own[name](given[1:])


def _completion(arguments: Sequence[str]) -> int:
    shell = completion_parser().parse_args(arguments).shell
    try:
        print(completion_script(shell))
    except ModuleNotFoundError as error:
        return _fail(f"dne completion needs {error.name}: pip install dne-serve brings it")
    return 0


def _demo(arguments: Sequence[str]) -> int:
    try:
        from dne_client.demo import story
    except ModuleNotFoundError as error:
        return _fail(f"dne demo needs {error.name}: pip install 'dne-serve[demo]' brings it")
    return story.main(arguments)


def _run_part(command: str, arguments: Sequence[str]) -> int:
    """Run another command of this distribution as its own entry point does."""
    (entry,) = distribution("dne-serve").entry_points.select(group="console_scripts", name=command)
    try:
        run = entry.load()
    except ModuleNotFoundError as error:
        return _fail(
            f"{command} needs {error.name}, which is not installed: pip install dne-serve brings it"
        )
    sys.argv = [command, *arguments]
    return int(run())


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USAGE


def _version() -> str:
    try:
        return distribution("dne-serve").version
    except PackageNotFoundError:
        return "of an unknown version"


PARSERS = {
    "train": "trainer.cli:build_parser",
    "store": "model_store.cli.main:build_parser",
    "serve": "dne_serve.cli:build_parser",
    "predict": "dne_client.predicting:parser",
    "models": "dne_client.predicting:models_parser",
    "demo": "dne_client.demo:parser",
    "completion": "dne_client.__main__:completion_parser",
}
"""The parsers of `dne`. They are imported here only: a machine with the client alone lacks most."""
SHELLS = ("bash", "zsh", "fish")
FILES = frozenset({"CERT", "DATA", "FILE", "KEYFILE", "LOG", "TRUST"})
FOLDERS = frozenset({"DIR", "FOLDER", "STORE"})


def completion_parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="dne completion",
        description="Prints a script that completes dne, dne-train, dne-store and dne-serve.",
        epilog='Load it in ~/.bashrc or ~/.zshrc with `eval "$(dne completion bash)"`, or in '
        "~/.config/fish/config.fish with `dne completion fish | source`.",
    )
    made.add_argument("shell", choices=SHELLS, help="the shell that is to load it")
    return made


def completion_script(shell: str) -> str:
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


if __name__ == "__main__":
    sys.exit(main())
