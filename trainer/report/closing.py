"""Close a run with what is served now, and the commands that a person may want next."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from model_store.cli.command import DEFAULT_CHANNEL, default_store
from model_store.tables import printable
from trainer.versions.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The last lines for a person, whose commands reach the same channel of the same store."""

    outcome: Outcome
    store: str
    channel: str

    def tell(self) -> None:
        print(self._served())
        print("next:")
        rows = self._commands()
        width = max(len(command) for command, _ in rows)
        for command, purpose in rows:
            print(f"  {printable(command):{width}}  {purpose}")

    @property
    def _last(self) -> Outcome:
        return self.outcome.deeper or self.outcome

    def _served(self) -> str:
        last, version = self._last, self._last.manifest.version
        if last.promoted:
            return f"served: version {version}; running servers load it by themselves"
        if last.served is None:
            return f"served: nothing yet; version {version} is published and not promoted"
        return f"served: version {last.served}, as before; version {version} is published beside it"

    def _commands(self) -> list[tuple[str, str]]:
        version, parent = self._last.manifest.version, self._last.manifest.parent
        if not self._last.promoted:
            return [
                (f"dne-store show {version}{self._in_store}", "the version, and its verdict"),
                (f"dne-store promote {version}{self._in_channel}", "serve it all the same"),
            ]
        more = (f"dne-train add-task --data FOLDER{self._in_channel}", "teach more classes")
        if parent is None:
            return [(f"dne-serve{self._in_channel}", "answer requests over HTTP"), more]
        return [more, (f"dne-store rollback{self._in_channel}", f"go back to version {parent}")]

    @property
    def _in_store(self) -> str:
        return f" --store {shlex.quote(self.store)}" if self.store != default_store() else ""

    @property
    def _in_channel(self) -> str:
        named = f" --channel {shlex.quote(self.channel)}"
        return self._in_store + (named if self.channel != DEFAULT_CHANNEL else "")
