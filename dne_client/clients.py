"""Carry conversations out, with threads (`Client`) or with `await` (`AsyncClient`)."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar

import httpx

from dne_client import calls
from dne_client.answers import (
    Answer,
    ClassName,
    Moved,
    Outcome,
    Prediction,
    Ready,
    VersionDetails,
    Versions,
)
from dne_client.calls import Call
from dne_client.conversation import Came, Conversation, Retries, Wait, converse, converse_group
from dne_client.errors import BadInput
from dne_client.images import Image, Placed, grouped, placed, read_upload

T = TypeVar("T")
URL = "http://127.0.0.1:8000"
RETRIES = Retries()
CONNECTIONS = 4
"""Requests under way at a time: two in the engine's queue behind the one that is computed, and one
on the way."""
TIMEOUT_S = 60.0


def _settings(
    url: str, *, token: str | None, timeout_s: float, verify: ssl.SSLContext | bool
) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise BadInput(f"{url!r} is no address of a server: write http://HOST:PORT")
    return {
        "base_url": url.rstrip("/") + "/",
        "headers": {"Authorization": f"Bearer {token}"} if token else {},
        "timeout": timeout_s,
        "verify": verify,
    }


class Client:
    """Ask a server. One client may be used by several threads."""

    def __init__(
        self,
        url: str = URL,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: Retries = RETRIES,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`token` is sent as a bearer token. `verify` takes an SSL context for a certificate
        authority of one's own."""
        settings = _settings(url, token=token, timeout_s=timeout_s, verify=verify)
        self._http = httpx.Client(**settings, transport=transport)
        self._retries = retries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def predict(
        self,
        image: Image,
        *,
        top_k: int | None = None,
        version: int | None = None,
        at_least: int | None = None,
    ) -> Prediction:
        """Classify one image. `at_least` refuses answers of versions with a smaller number."""
        return self.predict_batch(
            [image], top_k=top_k, version=version, at_least=at_least
        ).predictions[0]

    def predict_batch(
        self,
        images: Iterable[Image],
        *,
        top_k: int | None = None,
        version: int | None = None,
        at_least: int | None = None,
    ) -> Answer:
        """Classify images in one request: one version answers all, and one bad image fails all."""
        uploads = [read_upload(image) for image in images]
        return self._ask(calls.predict(uploads, top_k=top_k, version=version, at_least=at_least))

    def predict_many(
        self,
        images: Iterable[Image],
        *,
        top_k: int | None = None,
        version: int | None = None,
        connections: int = CONNECTIONS,
    ) -> Iterator[Outcome]:
        """Classify any number of images in background threads, and yield outcomes in their order.

        A bad image fails alone. Images are read shortly before they are sent, so memory holds a few
        groups of them, however many there are.
        """
        with ThreadPoolExecutor(connections, thread_name_prefix="dne-client") as threads:
            waiting: deque[Future[list[Outcome]]] = deque()
            try:
                for group in grouped(placed(images)):
                    if len(waiting) == 2 * connections:
                        yield from waiting.popleft().result()
                    waiting.append(threads.submit(self._group, group, top_k, version))
                while waiting:
                    yield from waiting.popleft().result()
            finally:
                for one in waiting:
                    one.cancel()

    def versions(self, *, before: int | None = None, limit: int | None = None) -> Versions:
        return self._ask(calls.versions(before=before, limit=limit))

    def version(self, number: int) -> VersionDetails:
        return self._ask(calls.version(number))

    def classes(self, version: int | None = None) -> tuple[ClassName, ...]:
        return self._ask(calls.classes(version))

    def ready(self) -> Ready:
        """Tell what is served; raise Busy while nothing is."""
        return self._ask(calls.ready())

    def promote(self, version: int, *, reason: str = "") -> Moved:
        return self._ask(calls.move("promote", to=version, reason=reason))

    def rollback(self, to: int | None = None, *, reason: str = "") -> Moved:
        return self._ask(calls.move("rollback", to=to, reason=reason))

    def resume(self, *, reason: str = "") -> Moved:
        return self._ask(calls.move("resume", to=None, reason=reason))

    def _group(self, group: list[Placed], top_k: int | None, version: int | None) -> list[Outcome]:
        return self._carry(
            converse_group(group, top_k=top_k, version=version, retries=self._retries)
        )

    def _ask(self, call: Call[T]) -> T:
        return self._carry(converse(call, retries=self._retries))

    def _carry(self, conversation: Conversation[T]) -> T:
        came: Came = None
        while True:
            try:
                step = conversation.send(came)
            except StopIteration as end:
                answer: T = end.value
                return answer
            came = None
            if isinstance(step, Wait):
                time.sleep(step.seconds)
                continue
            try:
                came = self._http.request(**_request(step))
            except httpx.TransportError as error:
                came = error


class AsyncClient:
    """Ask a server from a coroutine."""

    def __init__(
        self,
        url: str = URL,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: Retries = RETRIES,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`token` is sent as a bearer token. `verify` takes an SSL context for a certificate
        authority of one's own."""
        settings = _settings(url, token=token, timeout_s=timeout_s, verify=verify)
        self._http = httpx.AsyncClient(**settings, transport=transport)
        self._retries = retries

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def predict(
        self,
        image: Image,
        *,
        top_k: int | None = None,
        version: int | None = None,
        at_least: int | None = None,
    ) -> Prediction:
        """Classify one image. `at_least` refuses answers of versions with a smaller number."""
        answer = await self.predict_batch([image], top_k=top_k, version=version, at_least=at_least)
        return answer.predictions[0]

    async def predict_batch(
        self,
        images: Iterable[Image],
        *,
        top_k: int | None = None,
        version: int | None = None,
        at_least: int | None = None,
    ) -> Answer:
        """Classify images in one request: one version answers all, and one bad image fails all."""
        uploads = [read_upload(image) for image in images]
        call = calls.predict(uploads, top_k=top_k, version=version, at_least=at_least)
        return await self._ask(call)

    async def predict_many(
        self,
        images: Iterable[Image],
        *,
        top_k: int | None = None,
        version: int | None = None,
        connections: int = CONNECTIONS,
    ) -> AsyncIterator[Outcome]:
        """Classify any number of images in background tasks, and yield outcomes in their order.

        A bad image fails alone. Memory holds a few groups of images, however many there are.
        """
        groups = grouped(placed(images))
        waiting = deque(
            self._begin(group, top_k, version) for group in itertools.islice(groups, connections)
        )
        try:
            while waiting:
                found = await waiting[0]
                waiting.popleft()
                for group in itertools.islice(groups, 1):
                    waiting.append(self._begin(group, top_k, version))
                for outcome in found:
                    yield outcome
        finally:
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def versions(self, *, before: int | None = None, limit: int | None = None) -> Versions:
        return await self._ask(calls.versions(before=before, limit=limit))

    async def version(self, number: int) -> VersionDetails:
        return await self._ask(calls.version(number))

    async def classes(self, version: int | None = None) -> tuple[ClassName, ...]:
        return await self._ask(calls.classes(version))

    async def ready(self) -> Ready:
        """Tell what is served; raise Busy while nothing is."""
        return await self._ask(calls.ready())

    async def promote(self, version: int, *, reason: str = "") -> Moved:
        return await self._ask(calls.move("promote", to=version, reason=reason))

    async def rollback(self, to: int | None = None, *, reason: str = "") -> Moved:
        return await self._ask(calls.move("rollback", to=to, reason=reason))

    async def resume(self, *, reason: str = "") -> Moved:
        return await self._ask(calls.move("resume", to=None, reason=reason))

    def _begin(
        self, group: list[Placed], top_k: int | None, version: int | None
    ) -> asyncio.Task[list[Outcome]]:
        conversation = converse_group(group, top_k=top_k, version=version, retries=self._retries)
        return asyncio.create_task(self._carry(conversation))

    async def _ask(self, call: Call[T]) -> T:
        return await self._carry(converse(call, retries=self._retries))

    async def _carry(self, conversation: Conversation[T]) -> T:
        came: Came = None
        while True:
            try:
                step = conversation.send(came)
            except StopIteration as end:
                answer: T = end.value
                return answer
            came = None
            if isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
                continue
            try:
                came = await self._http.request(**_request(step))
            except httpx.TransportError as error:
                came = error


def _request(call: Call[Any]) -> dict[str, Any]:
    """Write a call in httpx's words."""
    kind = "application/octet-stream"  # the server tells images by their bytes
    files = [("files", (one.filename, one.data, kind)) for one in call.files]
    return {
        "method": call.method,
        "url": call.path,
        "params": dict(call.params),
        "headers": dict(call.headers),
        "files": files or None,
        "json": call.body,
    }
