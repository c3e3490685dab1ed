"""Parse the rules by which a server keeps pictures: `unknown`, `score<0.6`, `margin<0.1`,
`disagrees` (a shadow or canary gives another label) or `sample=1%`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from model_store.errors import WrongUsage

What = Literal["unknown", "score", "margin", "disagrees", "sample"]
BELOW = re.compile(r"(score|margin)\s*<\s*([01](?:\.[0-9]{1,6})?|\.[0-9]{1,6})")
SAMPLE = re.compile(r"sample\s*=\s*([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectRule:
    """A reason to keep a picture. `bound` is the limit of a score, or the share of a sample."""

    text: str
    what: What
    bound: float = 0.0


def parse_collect_rules(texts: Sequence[str]) -> tuple[CollectRule, ...]:
    return tuple(map(_parse, texts))


def _parse(text: str) -> CollectRule:
    bare = "".join(text.split())
    if bare == "unknown":
        return CollectRule(text=bare, what="unknown")
    if bare == "disagrees":
        return CollectRule(text=bare, what="disagrees")
    if (found := BELOW.fullmatch(bare)) and 0 < float(found[2]) <= 1:
        what: What = "score" if found[1] == "score" else "margin"
        return CollectRule(text=bare, what=what, bound=float(found[2]))
    if (found := SAMPLE.fullmatch(bare)) and float(found[1]) <= 100:
        return CollectRule(text=bare, what="sample", bound=float(found[1]) / 100)
    raise WrongUsage(
        f"{text!r} is no rule to collect by: write unknown, score<0.6, margin<0.1, disagrees or "
        "sample=1%"
    )
