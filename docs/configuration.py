"""Write configuration.md from the settings and options of the three commands.

python -m docs.configuration
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dne_client.predicting import parser as client_parser
from dne_serve.cli import build_parser as server_parser
from dne_serve.settings import Settings
from model_store.cli.main import build_parser as store_parser
from trainer.cli import build_parser as trainer_parser

PAGE = Path(__file__).with_name("configuration.md")
COMMON = frozenset({"--store", "--json", "--channel", "--help"})
"""Options of most commands, described in the opening or not at all."""
OF_WRITERS = frozenset({"--reason", "--sign", "--trust"})
"""Options of the commands of `dne-store` that write, described once."""

OPENING = """\
# Configuration

`make docs` writes this page from the code.

Every command takes `--json` and then prints one JSON object as its last line. Commands that read \
or move a channel take `--channel` (`production` by default).

## Variables of all commands
| variable | default | meaning |
|---|---|---|
| `DNE_STORE` | `./models` | the store: a directory or `s3://bucket/prefix`; `--store` wins |
| `DNE_CACHE` | `$XDG_CACHE_HOME/dne-serve`, else `~/.cache/dne-serve` | folder for shards of \
[object storage](object-storage.md), checkpoints, and measurements of the machine |
| `DNE_STATE` | `$XDG_STATE_HOME/dne-serve`, else `~/.local/state/dne-serve` | folder for the key \
that seals tokens and checkpoints in the cache |
| `DNE_CACHE_BYTES` | 8 GiB | size of cached shards at most; 0 turns this cache off |
| `DNE_TRUST` | – | the [trust file](signatures.md); `--trust` wins |
| `DNE_SIGN_KEY` | – | private key that signs what is published; `--sign` wins |
| `DNE_LABEL_STUDIO_URL` | `http://127.0.0.1:8080` | [Label Studio](label-studio.md), for \
`dne-train label-studio`; `--url` wins |
| `DNE_LABEL_STUDIO_TOKEN` | – | access token of an account of Label Studio; `--token` wins |

## `dne-serve`
Each setting is an option and an environment variable. The option wins. An empty variable counts \
as not set. A switch takes `true` or `false` as a variable, and its name or `--no-` and its name \
as an option."""

CLIENT_VARIABLES = """\
| variable | default | meaning |
|---|---|---|
| `DNE_URL` | `http://127.0.0.1:8000` | the address of the server; `--url` wins |
| `DNE_TOKEN` | – | the token that is sent to the server |"""

AWAY = "–"


def page() -> str:
    """Return the whole page."""
    trainer, store, client = trainer_parser(), store_parser(), client_parser()
    parts = [OPENING, _table(("option, variable", "default", "meaning"), _settings())]
    parts += _commands_with_options(trainer)
    parts += [
        f"## `{store.prog}`",
        "Commands that write take `--reason T`, `--sign KEYFILE` or both. `--trust FILE` goes with "
        "`--sign`, `--require-signatures` and `keys`.",
        _table(("command", "options", "meaning"), _commands(store)),
        f"## `{client.prog}`",
        client.description or "",
        CLIENT_VARIABLES,
        _table(("option", "meaning"), _options(client)),
    ]
    return "\n\n".join(parts) + "\n"


def _commands_with_options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Write a section a command, and one table of the options that several commands share."""
    options = {name: [*_options(command)] for name, command in _leaves(parser)}
    users: dict[tuple[str, str], list[str]] = {}
    for name, rows in options.items():
        for row in rows:
            users.setdefault(row, []).append(name)
    shared = [(row[0], ", ".join(names), row[1]) for row, names in users.items() if len(names) > 1]
    yield f"## `{parser.prog}`"
    yield "Options of several commands:"
    yield _table(("option", "commands", "meaning"), shared)
    for name, command in _leaves(parser):
        yield f"### `{parser.prog} {name}`"
        yield command.description or ""
        own = [row for row in options[name] if len(users[row]) == 1]
        yield from [_table(("option", "meaning"), own)] if own else []


def _settings() -> Iterator[Sequence[str]]:
    known = {option for action in server_parser()._actions for option in action.option_strings}
    for name, field in Settings.model_fields.items():
        option = f"--{name.replace('_', '-')}"
        shown = f"`{option}`, " if option in known else ""
        variable = f"{shown}`DNE_{name.upper()}`"
        yield variable, _default(name, field.default), field.description or ""


def _default(name: str, value: Any) -> str:
    if value is None or value == "":
        return AWAY
    if isinstance(value, bool):
        return "on" if value else "off"
    if name.endswith("bytes"):
        return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"
    if isinstance(value, int | float):
        return f"{value:,}" if value > 9999 else f"`{value:g}`"
    return f"`{value}`"


def _leaves(
    parser: argparse.ArgumentParser, *above: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command that has no subcommands, with its name."""
    groups = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    for group in groups:
        for name, command in group.choices.items():
            yield from _leaves(command, *above, name)
    if not groups:
        yield " ".join(above), parser


def _options(command: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in command._actions:
        if not COMMON & set(action.option_strings):
            yield f"`{_spelt(action)}`", (action.help or "") % vars(action)


def _commands(parser: argparse.ArgumentParser) -> Iterator[Sequence[str]]:
    for name, command in _leaves(parser):
        shown = (option for option, _ in _options(command))
        options = [option for option in shown if option.strip("`").split()[0] not in OF_WRITERS]
        yield f"`{name}`", ", ".join(options), command.description or ""


def _spelt(action: argparse.Action) -> str:
    """Write an option as a person types it: `--epochs N`."""
    name = action.option_strings[0] if action.option_strings else ""
    if action.nargs == 0:
        return ", ".join(action.option_strings)
    value = action.metavar or "|".join(map(str, action.choices or [action.dest.upper()]))
    shown = f"{name} {value}".strip()
    return f"[{shown}]" if action.nargs == "?" else shown


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(_cell(one) for one in line)} |" for line in [head, *rows]]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page())
