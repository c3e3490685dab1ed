"""Hand events to the outboxes of all URLs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dne_serve.rules.webhooks import parse_urls
from dne_serve.settings import Settings
from dne_serve.webhooks.events import Event
from dne_serve.webhooks.outbox import Outbox, Outcome, Patience
from dne_serve.webhooks.signature import read_secrets

PATIENCE = Patience()
FLUSH_S = 2.0
"""Time that events get at the end of the server, or the grace time if this is shorter."""

log = logging.getLogger("dne_serve.webhooks")


class Announcer:
    """The webhooks of one server. Without a URL it has no thread, and drops what it is told."""

    def __init__(
        self,
        settings: Settings,
        *,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
        patience: Patience = PATIENCE,
    ) -> None:
        urls = parse_urls(settings.webhook) if settings.webhook is not None else ()
        secrets = read_secrets(settings) if urls else ()
        self._flush_s = min(FLUSH_S, settings.grace_seconds)
        self._outboxes = [
            Outbox(url, secrets=secrets, on_outcome=on_outcome, patience=patience) for url in urls
        ]
        if urls and not secrets:
            log.warning(
                "webhooks are not signed, so that receivers cannot tell who posts: give "
                "--webhook-secret-file or DNE_WEBHOOK_SECRET"
            )

    @property
    def is_heard(self) -> bool:
        """Tell whether there is any URL."""
        return bool(self._outboxes)

    def announce(self, event: Event) -> None:
        """Post an event to every URL. Return at once; any thread may call this."""
        for outbox in self._outboxes:
            outbox.put(event)

    def start(self) -> None:
        for outbox in self._outboxes:
            outbox.start()

    def stop(self) -> None:
        """Post what waits, within the time for it."""
        ends = time.monotonic() + self._flush_s
        for outbox in self._outboxes:
            outbox.close(ends=ends)
        for outbox in self._outboxes:
            outbox.join()
