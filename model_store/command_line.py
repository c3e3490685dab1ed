"""Parse command lines, and name the nearest option or command to a misspelt one."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that answers a misspelt word with one line, which names the nearest known word."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        asked = list(sys.argv[1:] if args is None else args)
        options, unknown = self.parse_known_args(asked, namespace)
        if unknown:
            chosen = self
            for word in asked:
                chosen = _subparsers(chosen).get(word, chosen)
            chosen._refuse(unknown)
        return options

    def error(self, message: str) -> NoReturn:
        """End with one line, like all errors of the commands, instead of the usage."""
        self.exit(2, f"error: {message}; `{self.prog} --help` lists all\n")

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if not options:
            self.error(f"unexpected argument {unknown[0]!r}")
        near = nearest(options[0], self._option_string_actions)
        hint = f"did you mean {near}?" if near else f"`{self.prog} --help` lists all"
        self.exit(2, f"error: {self.prog} has no option {options[0]}: {hint}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the nearest subcommand. Other choices are few, and argparse lists them."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = nearest(str(value), action.choices)
            hint = f"did you mean {near}?" if near else f"`{self.prog} --help` lists all"
            self.exit(2, f"error: {self.prog} has no command {value!r}: {hint}\n")
        super()._check_value(action, value)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Find the known word that is most like a misspelt one, or None if none is."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, Parser]:
    groups = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return {name: made for group in groups for name, made in group.choices.items()}
