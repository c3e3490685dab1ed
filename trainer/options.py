"""Make command-line options of a dataclass's fields, and the dataclass of the options given."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import MISSING, Field, field, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from model_store.cli.command import add_json_option, add_store_option

GROUPS = {
    "the network (fixed by the first task)": "Later tasks may repeat these, not change them.",
    "the gate": "A version that breaks one of these is published and not promoted (exit 3).",
}
"""The sentences below the titles of groups, for those that need one."""

Asked = TypeVar("Asked")


def option(default: object, help: str, **how: Any) -> Any:
    """Make a field that is an option; the help may name its default as {default}."""
    return field(default=default, metadata=described(help, **how))


def described(help: str, *, name: str | None = None, group: str = "", **how: Any) -> dict[str, Any]:
    """Make the metadata of a field that is an option; `how` goes to argparse.

    The option is named after the field, unless `name` is given.
    """
    return {"help": help, "name": name, "group": group, "how": how}


def add_options(parser: argparse.ArgumentParser, asked: type) -> None:
    """Add the options of a dataclass in the order of its fields, those of nested ones included.

    An option that is not given is absent from the result: only the dataclass holds defaults.
    """
    groups: dict[str, Any] = {"": parser}
    for one, kind, required in _leaves(asked):
        if "add" in one.metadata:  # the option is shared with other commands
            one.metadata["add"](parser)
            continue
        title = one.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title, GROUPS.get(title))
        _add_option(groups[title], one, kind, required=required)


def read_options(asked: type[Asked], given: argparse.Namespace, **others: object) -> Asked:
    """Make the dataclass of the options that were given; `others` has values for single fields."""
    hints, values = get_type_hints(asked), dict(others)
    for one in fields(asked):  # type: ignore[arg-type]
        kind = hints[one.name]
        if one.name in values:
            continue
        if is_dataclass(kind):
            values[one.name] = read_options(kind, given)  # type: ignore[arg-type]
        elif hasattr(given, one.name):
            values[one.name] = getattr(given, one.name)
    return asked(**values)


def option_name(one: Field[Any]) -> str:
    return one.metadata["name"] or f"--{one.name.replace('_', '-')}"


def _leaves(asked: type, *, optional: bool = False) -> Iterator[tuple[Field[Any], Any, bool]]:
    """Yield each field that is an option, its type, and whether the option has to be given."""
    hints = get_type_hints(asked)
    for one in fields(asked):
        kind = hints[one.name]
        plain = next((part for part in get_args(kind) if is_dataclass(part)), kind)
        if is_dataclass(plain):
            yield from _leaves(plain, optional=optional or plain is not kind)  # type: ignore[arg-type]
        elif one.metadata:
            yield one, kind, one.default is MISSING and not optional


def _add_option(group: Any, one: Field[Any], kind: Any, *, required: bool) -> None:
    how = dict(one.metadata["how"])
    how["help"] = one.metadata["help"].replace("{default}", str(one.default))
    name = option_name(one)
    if name.startswith("--"):
        how.setdefault("required", required)
        how |= {"dest": one.name, "default": argparse.SUPPRESS}
    if kind is bool:
        how.setdefault("action", "store_true")
    elif kind == bool | None:
        how["action"] = argparse.BooleanOptionalAction
    else:
        kinds = (part for part in (*get_args(kind), kind) if part is not NoneType)
        how.setdefault("type", next(kinds))
    group.add_argument(name, **how)


def share(text: str) -> float:
    """Read a share: 0.8, 80% and 80 are the same, because a share above 1 is meant in percent."""
    value = _number(text, expected="a share: give 0.8 or 80%")
    return value / 100 if text.endswith("%") or value > 1 else value


def points(text: str) -> float:
    return _number(text, expected="a number of points: give 2 or 0.5") / 100


def memory_size(text: str) -> int | Literal["statistics"]:
    """Read a number of exemplars, or the word for keeping none and no held-out image."""
    if text == "statistics":
        return "statistics"
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of exemplars nor the word statistics"
        ) from error


def _number(text: str, *, expected: str) -> float:
    try:
        return float(text.removesuffix("%"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from error


def add_processes_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        metavar="N",
        type=int,
        help="learn in N processes on this machine; torchrun starts them on several (default: 1)",
    )


def add_running_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command has."""
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default=os.environ.get("DNE_DEVICE") or "auto",
        help="where to compute (default: a GPU when there is one)",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=int,
        help="CPU threads (default: one for each core, or fewer if the first steps are faster so)",
    )
    add_store_option(parser)
    add_json_option(parser)
