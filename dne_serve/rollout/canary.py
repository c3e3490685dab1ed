"""Keep versions beside the served one: a canary answers a share of the requests, and the answers of
a shadow are only compared.

Versions of one lineage share one pass over an image.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dne_serve.engines.base import Resident, joined
from dne_serve.observe.events import By
from dne_serve.rollout.loaded_versions import LoadedVersions
from dne_serve.setting_values import Canary
from model_store.store.store import Store

RETRY_S = 30.0

log = logging.getLogger("dne_serve.canary")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The version that answers a request, the reason, and the shadow to compare with."""

    resident: Resident
    by: By
    shadow: Resident | None = None


@dataclass(slots=True)
class _Beside:
    """A version that is wanted beside the served one."""

    name: str
    version: int
    resident: Resident | None = None
    retry_at: float = 0.0


@dataclass(slots=True)
class CanaryAndShadow:
    """The canary and the shadow of a server."""

    canary: Canary | None
    shadow: int | None
    loaded: LoadedVersions
    clock: Callable[[], float] = time.monotonic
    compares_canary: bool = False
    """Compare the canary's answers with those of the served version, whatever it costs. Where the
    canary's own pass answers for the served version too, they are always compared."""
    share: float = field(init=False)
    """The share of the requests that the canary answers now. A watch may change it."""
    _canary: _Beside | None = field(init=False)
    _shadow: _Beside | None = field(init=False)
    _due: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._canary = _Beside("canary", self.canary.version) if self.canary else None
        self.share = self.canary.share if self.canary else 0.0
        self._shadow = _Beside("shadow", self.shadow) if self.shadow is not None else None

    def load(self, open_store: Callable[[], Store]) -> None:
        """Load the canary and the shadow unless they are in memory; blocks. Log a failure, and try
        again after RETRY_S: the served version does not depend on them."""
        for trial in (self._canary, self._shadow):
            if trial is None or trial.resident is not None or self.clock() < trial.retry_at:
                continue
            try:
                store = open_store()
                trial.resident = self.loaded.load(store.read_manifest(trial.version), shards=store)
                self.loaded.stand_beside(self._loaded())
                log.info("version %s stands by as %s", trial.version, trial.name)
            except Exception as error:
                trial.retry_at = self.clock() + RETRY_S
                log.error("cannot load version %s as %s: %s", trial.version, trial.name, error)

    def choose(self, served: Resident, *, at_least: int = 0) -> Chosen:
        """Choose the version for a request that names none. The canary's share is counted, not
        drawn by chance: of n requests it answers share × n, rounded down. A canary older than
        `at_least` is passed over."""
        canary = self._canary.resident if self._canary else None
        if canary is not None and (canary.version == served.version or canary.version < at_least):
            canary = None
        if canary is not None and self._is_due():
            is_free = joined(canary, served) is canary
            compared = served if is_free or self.compares_canary else None
            return Chosen(resident=canary, by="canary", shadow=compared)
        shadow = self._shadow.resident if self._shadow else None
        if shadow is not None and shadow.version == served.version:
            shadow = None
        return Chosen(resident=served, by="served", shadow=shadow)

    def ready(self, name: Literal["canary", "shadow"]) -> int | None:
        """Return the version that is in memory under this name, and not taken back."""
        if name == "canary" and not self.share:
            return None
        trial = self._canary if name == "canary" else self._shadow
        return trial.version if trial is not None and trial.resident is not None else None

    def _is_due(self) -> bool:
        self._due += self.share
        if self._due < 1 - 1e-9:
            return False
        self._due -= 1
        return True

    def _loaded(self) -> list[Resident]:
        both = (self._canary, self._shadow)
        return [trial.resident for trial in both if trial and trial.resident]
