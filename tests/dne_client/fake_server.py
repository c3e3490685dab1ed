"""A server that answers from a list, as httpx's transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from dne_client import Client, Retries

SOON = Retries(attempts=4, first_wait_s=0.001)
PROBLEM = {"content-type": "application/problem+json"}
Reply = httpx.Response | Exception


def answer(*labels: str, version: int = 3, **others: Any) -> httpx.Response:
    predictions = [
        {
            "filename": f"{place}.png",
            "label": label,
            "score": 0.9,
            "level": 0,
            "task": "animals",
            "unknown": False,
            "unknown_score": None,
            "top": [{"label": label, "score": 0.9}],
            **others,
        }
        for place, label in enumerate(labels)
    ]
    whole = {"version": version, "canary": False, "predictions": predictions, "added later": 1}
    return httpx.Response(200, json=whole)


def refusal(status: int, *, detail: str = "no", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"type": "t", "title": "T", "status": status, "detail": detail, "instance": "urn:1"}
    return httpx.Response(status, json=body, headers={**PROBLEM, **named})


class FakeServer:
    """Gives its replies in order, and keeps the requests."""

    def __init__(self, *replies: Reply) -> None:
        self._replies = list(replies)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def client(self, **others: Any) -> Client:
        return client_of(self, **others)


def client_of(reply: Callable[[httpx.Request], httpx.Response], **others: Any) -> Client:
    given = {"retries": SOON, **others}
    return Client("http://server", transport=httpx.MockTransport(reply), **given)
