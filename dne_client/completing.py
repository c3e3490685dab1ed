"""Run `dne completion`: print the script that lets a shell complete the four commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).with_name("completion")
WORDS = FOLDER / "words"
"""Lists every command and option. `make docs` writes it."""
SHELLS = ("bash", "zsh", "fish")


def main(arguments: Sequence[str] | None = None) -> int:
    print(script(parser().parse_args(arguments).shell), end="")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="dne completion",
        description="Prints a script that completes dne, dne-train, dne-store and dne-serve.",
        epilog="Load it in ~/.bashrc or ~/.zshrc with `source <(dne completion bash)`, or in "
        "~/.config/fish/config.fish with `dne completion fish | source`.",
    )
    made.add_argument("shell", choices=SHELLS, help="the shell that is to load it")
    return made


def script(shell: str) -> str:
    """Fill the words into the script of a shell."""
    words = WORDS.read_text().rstrip("\n")
    if shell == "fish":  # it has no here-documents; only these two are special in its quotes
        words = words.replace("\\", "\\\\").replace("'", "\\'")
    return (FOLDER / f"dne.{shell}").read_text().replace("@WORDS@", words)
