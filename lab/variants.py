"""Define variants of the product's network, as subclasses of its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from model_store.network.network import Network

NetworkName = Literal["dne"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    network: type[Network]
    base: str = "transformer"
    """The name of the first expert's kind: variants of equal `base` begin with the same one."""
    folds: bool = False
    """True if the folded form computes the same."""


VARIANTS: Mapping[NetworkName, Variant] = {
    "dne": Variant(network=Network, folds=True),
}
