"""Parse the rules of the guard: `errors>1%` (requests that a version failed to answer) or
`unknown>30%` (images that are like none of its classes)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from model_store.errors import WrongUsage

RULE = re.compile(r"(errors|unknown)\s*>\s*([0-9]{1,3}(?:\.[0-9]{1,4})?)\s*%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Largest share that a version may reach after its promotion."""

    text: str
    what: str
    share: float


def parse_rules(texts: Sequence[str]) -> tuple[Rule, ...]:
    return tuple(map(_parse, texts))


def _parse(text: str) -> Rule:
    found = RULE.fullmatch(text)
    if found is None or float(found[2]) > 100:
        raise WrongUsage(f"{text!r} is no guard: write errors>1% or unknown>30%")
    return Rule(text=text, what=found[1], share=float(found[2]) / 100)
