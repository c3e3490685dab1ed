"""dne: one command over dne-train, dne-store and dne-serve, and commands for the shell."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution

from dne_client import completing, predicting

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
LISTED = "\n".join(f"    {name:<11} {meaning}" for name, meaning in COMMANDS.items())
HELP = f"""usage: dne COMMAND …

Teaches, keeps, serves and asks a classifier that grows. Each command has --help.

commands:
{LISTED}

options:
  --help      show this message and end
  --version   print the software's version and end"""


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        code = _main(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (`| head`). Python's own flush at the end must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code


def _main(given: Sequence[str]) -> int:
    name = given[0] if given else "--help"
    if name in {"--help", "-h", "help"}:
        print(HELP)
        return 0 if given else EXIT_USAGE
    if name == "--version":
        print(f"dne {_version()}")
        return 0
    if name == "predict":
        return predicting.main(given[1:])
    if name == "completion":
        return completing.main(given[1:])
    if name == "demo":
        return _demo(given[1:])
    if name in PARTS:
        return _run_part(PARTS[name], given[1:])
    return _unknown(name)


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


def _unknown(name: str) -> int:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f": did you mean {near[0]}?" if near else f": there are {', '.join(COMMANDS)}"
    return _fail(f"dne has no command {name!r}{hint}")


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
