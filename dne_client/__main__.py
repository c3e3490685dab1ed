"""dne: one command over dne-train, dne-store and dne-serve, and commands for the shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution

from dne_client import completing, predicting
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
    own = {"predict": predicting.main, "completion": _completion, "demo": _demo}
    return own[name](given[1:])


def _completion(arguments: Sequence[str]) -> int:
    try:
        return completing.main(arguments)
    except ModuleNotFoundError as error:
        return _fail(f"dne completion needs {error.name}: pip install dne-serve brings it")


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


if __name__ == "__main__":
    sys.exit(main())
