"""Write the settings that sentences of the trainer name as the options of `dne-train`.

The trainer speaks of its settings as Python has them, in backticks: `memory=statistics`,
`skip_bad`. A user of the command reads `--memory statistics` and `--skip-bad`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from trainer.request import AddTask, Deepen, Evaluate, Report, Work

SETTING = re.compile(r"`([a-z]+(?:_[a-z]+)*)(?:=([^`]*))?`")


def _names(kind: Any) -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        yield name
        for part in (hint, *get_args(hint)):
            if is_dataclass(part) and isinstance(part, type):
                yield from (field.name for field in fields(part))


SETTINGS = frozenset(
    name for kind in (AddTask, Deepen, Work, Evaluate, Report) for name in _names(kind)
) | {"ray_address"}


def with_options(sentence: str) -> str:
    """Return the sentence with options in the place of settings."""
    return SETTING.sub(_option, sentence)


def _option(setting: re.Match[str]) -> str:
    name, value = setting.groups()
    if name not in SETTINGS:
        return setting[0]
    option = name.replace("_", "-")
    if value is None or value == "True":
        return f"--{option}"
    return f"--no-{option}" if value == "False" else f"--{option} {value}"
