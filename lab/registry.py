"""Know the methods by name, and read their options from text such as `dne:k=4`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from lab.method import Method, Options
from lab.methods.adapter import Adapter
from lab.methods.der import Der
from lab.methods.dne import Dne
from lab.methods.dytox import Dytox
from lab.methods.foster import Foster
from lab.methods.icarl import Icarl
from lab.methods.joint import Joint
from lab.methods.lda import Lda
from lab.methods.ncm import Ncm
from lab.methods.podnet import Podnet
from lab.methods.replay import Replay
from lab.presets import Preset
from model_store.errors import WrongUsage

METHODS: Mapping[str, type[Method]] = {
    "dne": Dne,
    "joint": Joint,
    "replay": Replay,
    "ncm": Ncm,
    "lda": Lda,
    "icarl": Icarl,
    "podnet": Podnet,
    "der": Der,
    "foster": Foster,
    "dytox": Dytox,
    "adapter": Adapter,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A method with its options, as one line of a table."""

    name: str
    options: Options

    def build(self, preset: Preset) -> Method:
        return METHODS[self.name](preset, self.options)

    @property
    def variant(self) -> str:
        """Spell the options that differ from their defaults: `k=4,attention=gated`."""
        plain = METHODS[self.name].options_type()
        values = ((one.name, getattr(self.options, one.name)) for one in fields(self.options))
        return ",".join(
            f"{name}={value}" for name, value in values if value != getattr(plain, name)
        )

    def __str__(self) -> str:
        return f"{self.name}:{self.variant}" if self.variant else self.name


def read_choice(text: str) -> Choice:
    """Read `method` or `method:option=value,option=value`."""
    name, _, asked = text.partition(":")
    if name not in METHODS:
        raise WrongUsage(f"method {name!r} is not one of {', '.join(METHODS)}")
    kind = METHODS[name].options_type
    hints = get_type_hints(kind)
    given: dict[str, Any] = {}
    for part in filter(None, asked.split(",")):
        key, _, value = part.partition("=")
        if key not in hints:
            known = ", ".join(hints) or "none"
            raise WrongUsage(f"{name} has no option {key!r}; its options: {known}")
        given[key] = _value(hints[key], value, what=f"option {key} of {name}")
    return Choice(name=name, options=kind(**given))


def _value(kind: Any, text: str, *, what: str) -> object:
    """Read a whole number, or one of a Literal's words."""
    if kind is int:
        if not text.isdecimal():
            raise WrongUsage(f"{what} must be a whole number, not {text!r}")
        return int(text)
    known = get_args(kind)
    if text not in known:
        raise WrongUsage(f"{what} must be one of {', '.join(map(str, known))}, not {text!r}")
    return text
