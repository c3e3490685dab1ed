"""The precision in which an engine computes each version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from model_store.precision import Asked, Precision, Trial, choose, refuse_unless_it_runs, try_out
from model_store.records.manifest import Manifest
from model_store.records.quality import Reduced

log = logging.getLogger("dne_serve")


class Precisions:
    """Decides once for each version, on any thread but the engine's: it may try a precision out
    in a child process, which takes seconds where this machine has not done so before."""

    def __init__(
        self,
        asked: Asked,
        *,
        offered: Sequence[Reduced],
        backend: str,
        try_out: Callable[[Reduced], Trial] = try_out,
    ) -> None:
        """WrongUsage for a precision that was asked for by name and cannot be had here."""
        refuse_unless_it_runs(asked, offered=offered, backend=backend, try_out=try_out)
        self._asked: Asked = asked
        self._offered = tuple(offered)
        self._try_out = try_out
        self._chosen: dict[str, Precision] = {}

    def of(self, manifest: Manifest) -> Precision:
        if manifest.digest not in self._chosen:
            choice = choose(
                manifest.metrics.agreement,
                asked=self._asked,
                offered=self._offered,
                try_out=self._try_out,
            )
            log.info("version %d is computed in %s", manifest.version, choice.precision)
            if self._asked != "auto":
                for reason in choice.refused:
                    log.warning("version %d: %s", manifest.version, reason)
            self._chosen[manifest.digest] = choice.precision
        return self._chosen[manifest.digest]
