"""Clients that ask again and again, and remember what became of each request."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import httpx

PAUSE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request. `version` is None if it failed."""

    began: float
    version: int | None
    failure: str = ""


class Load:
    """Clients of `POST /predict`, each with one request at a time. `attempts` is how often a client
    sends a request before it counts as failed."""

    def __init__(self, url: str, *, image: bytes, clients: int, attempts: int = 1) -> None:
        self._url, self._image, self._attempts = url, image, attempts
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on) for _ in range(clients)]
        self.asked: list[Asked] = []
        self.retried = 0

    def __enter__(self) -> Load:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for one in self._threads:
            one.join()

    @property
    def answered(self) -> int:
        return sum(one.version is not None for one in self.asked)

    @property
    def failed(self) -> list[Asked]:
        return [one for one in self.asked if one.version is None]

    def last_by(self, version: int, *, since: float) -> float:
        """Tell how long after `since` the last request began that this version answered."""
        began = [one.began for one in self.asked if one.version == version]
        return max(0.0, max(began, default=since) - since)

    def _ask_on(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._over.is_set():
                self.asked.append(self._ask(client))

    def _ask(self, client: httpx.Client) -> Asked:
        began, failure = time.monotonic(), ""
        for attempt in range(self._attempts):
            if attempt:
                self.retried += 1
                time.sleep(PAUSE_S)
            try:
                answer = client.post("/predict", content=self._image)
            except httpx.TransportError as error:
                failure = repr(error)
                continue
            if answer.status_code == 200:
                return Asked(began=began, version=int(answer.json()["version"]))
            failure = f"{answer.status_code} {answer.text[:300]}"
        return Asked(began=began, version=None, failure=failure)
