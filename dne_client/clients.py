"""Carry conversations out, with threads (`Client`) or with `await` (`AsyncClient`)."""

from __future__ import annotations

import asyncio
import itertools
import re
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import httpx

from dne_client import calls
from dne_client.answers import (
    Answer,
    ClassName,
    ModelsPage,
    Moved,
    Outcome,
    Prediction,
    Ready,
    VersionDetails,
    Versions,
)
from dne_client.calls import ApiCall
from dne_client.conversation import Came, Conversation, Retries, Wait, converse, converse_group
from dne_client.errors import BadInput
from dne_client.images import Image, Placed, grouped, placed, read_upload
from model_store.received import LEADS_NOWHERE, AnswerRefused, ExchangeDeadline, Received, TooSlow

TIMEOUT_S = 60.0
DEADLINE_S = 300.0
MAX_ANSWER_BYTES = 32 << 20
_KEPT_HEADERS = ("content-type", "retry-after")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The longest wait for the next bytes, and for a request with its whole answer."""

    wait_s: float = TIMEOUT_S
    whole_s: float = DEADLINE_S


def exchange(http: httpx.Client, call: ApiCall[Any], *, patience: Waits) -> httpx.Response:
    """Raise httpx.TransportError if no answer comes, and AnswerRefused for one that is too long or
    too slow."""
    deadline = ExchangeDeadline(patience.whole_s, longest_s=patience.wait_s)
    waits = {"connect": deadline, "read": deadline, "write": deadline, "pool": patience.wait_s}
    try:
        with http.stream(**_request(call), extensions={"timeout": waits}) as answer:
            if answer.is_stream_consumed:  # a transport for tests hands over whole answers
                return answer
            received = _received(answer)
            for piece in answer.iter_raw():
                deadline.check()
                received.add(piece)
            return _whole(answer, received)
    except (httpx.TimeoutException, TimeoutError) as error:
        deadline.refuse(error)
        raise
    except httpx.InvalidURL as error:
        raise AnswerRefused(LEADS_NOWHERE) from error


async def _exchange_async(
    http: httpx.AsyncClient, call: ApiCall[Any], *, patience: Waits
) -> httpx.Response:
    """Do as `exchange` does, from a coroutine."""
    try:
        async with asyncio.timeout(patience.whole_s), http.stream(**_request(call)) as answer:
            if answer.is_stream_consumed:
                return answer
            received = _received(answer)
            async for piece in answer.aiter_raw():
                received.add(piece)
            return _whole(answer, received)
    except TimeoutError as error:
        raise TooSlow(patience.whole_s) from error
    except httpx.InvalidURL as error:
        raise AnswerRefused(LEADS_NOWHERE) from error


def _request(call: ApiCall[Any]) -> dict[str, Any]:
    """Write a call in httpx's words."""
    kind = "application/octet-stream"  # the server tells images by their bytes
    files = [("files", (file.filename, file.data, kind)) for file in call.files]
    return {
        "method": call.method,
        "url": call.path,
        "params": dict(call.params),
        "headers": {"Accept-Encoding": "gzip", **call.headers},
        "files": files or None,
        "json": call.body,
    }


def _received(answer: httpx.Response) -> Received:
    return Received(answer.headers.get("content-encoding", ""), most_bytes=MAX_ANSWER_BYTES)


def _whole(answer: httpx.Response, received: Received) -> httpx.Response:
    """Write an answer that has arrived as a plain one."""
    headers = {name: answer.headers[name] for name in _KEPT_HEADERS if name in answer.headers}
    reason = answer.reason_phrase.encode("ascii", errors="ignore")
    return httpx.Response(
        answer.status_code,
        headers=headers,
        content=received.whole(),
        extensions={"reason_phrase": reason},
    )


T = TypeVar("T")
URL = "http://127.0.0.1:8000"
_RETRIES = Retries()
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
CONNECTIONS = 4
"""Requests under way at a time: two in the engine's queue behind the one that is computed, and one
on the way."""


def _settings(
    url: str,
    *,
    model: str | None,
    token: str | None,
    timeout_s: float,
    verify: ssl.SSLContext | bool,
) -> dict[str, Any]:
    if model is not None and not _MODEL.fullmatch(model):
        raise BadInput(f"{model[:100]!r} is not the name of a model")
    below = "" if model is None else f"models/{model}/"
    if not url.startswith(("http://", "https://")) or not _is_address(url):
        raise BadInput(f"{url!r} is not the address of a server: write http://HOST:PORT")
    return {
        "base_url": f"{url.rstrip('/')}/{below}",
        "headers": {"Authorization": f"Bearer {token}"} if token else {},
        "timeout": timeout_s,
        "verify": verify,
    }


def _is_address(url: str) -> bool:
    try:
        return bool(httpx.URL(url).host)
    except httpx.InvalidURL:
        return False


class Client:
    """Ask a server. One client may be used by several threads."""

    def __init__(
        self,
        url: str = URL,
        *,
        model: str | None = None,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        deadline_s: float = DEADLINE_S,
        retries: Retries = _RETRIES,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`model` names one of a server with many. `token` is sent as a bearer token. `timeout_s`
        limits each wait, and `deadline_s` one request with its whole answer. `verify` takes an SSL
        context for a certificate authority of one's own."""
        settings = _settings(url, model=model, token=token, timeout_s=timeout_s, verify=verify)
        self._http = httpx.Client(**settings, transport=transport)
        self._patience = Waits(wait_s=timeout_s, whole_s=deadline_s)
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
        answer = self.predict_batch([image], top_k=top_k, version=version, at_least=at_least)
        return answer.predictions[0]

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
                for task in waiting:
                    task.cancel()

    def versions(self, *, before: int | None = None, limit: int | None = None) -> Versions:
        return self._ask(calls.versions(before=before, limit=limit))

    def version(self, number: int) -> VersionDetails:
        return self._ask(calls.version(number))

    def classes(self, version: int | None = None) -> tuple[ClassName, ...]:
        return self._ask(calls.classes(version))

    def models(self, *, search: str = "", after: str = "") -> ModelsPage:
        """List models whose names contain a text: of a server with many, and a client without a
        model. A page begins behind the name `after`."""
        return self._ask(calls.models(search=search, after=after))

    def ready(self) -> Ready:
        """Return what is served. Raise Busy while nothing is."""
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

    def _ask(self, call: ApiCall[T]) -> T:
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
                came = exchange(self._http, step, patience=self._patience)
            except (httpx.TransportError, AnswerRefused) as error:
                came = error


class AsyncClient:
    """Ask a server from a coroutine."""

    def __init__(
        self,
        url: str = URL,
        *,
        model: str | None = None,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        deadline_s: float = DEADLINE_S,
        retries: Retries = _RETRIES,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`model` names one of a server with many. `token` is sent as a bearer token. `timeout_s`
        limits each wait, and `deadline_s` one request with its whole answer. `verify` takes an SSL
        context for a certificate authority of one's own."""
        settings = _settings(url, model=model, token=token, timeout_s=timeout_s, verify=verify)
        self._http = httpx.AsyncClient(**settings, transport=transport)
        self._patience = Waits(wait_s=timeout_s, whole_s=deadline_s)
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
                outcomes = await waiting[0]
                waiting.popleft()
                for group in itertools.islice(groups, 1):
                    waiting.append(self._begin(group, top_k, version))
                for outcome in outcomes:
                    yield outcome
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def versions(self, *, before: int | None = None, limit: int | None = None) -> Versions:
        return await self._ask(calls.versions(before=before, limit=limit))

    async def version(self, number: int) -> VersionDetails:
        return await self._ask(calls.version(number))

    async def classes(self, version: int | None = None) -> tuple[ClassName, ...]:
        return await self._ask(calls.classes(version))

    async def models(self, *, search: str = "", after: str = "") -> ModelsPage:
        """List models whose names contain a text: of a server with many, and a client without a
        model. A page begins behind the name `after`."""
        return await self._ask(calls.models(search=search, after=after))

    async def ready(self) -> Ready:
        """Return what is served. Raise Busy while nothing is."""
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

    async def _ask(self, call: ApiCall[T]) -> T:
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
                came = await _exchange_async(self._http, step, patience=self._patience)
            except (httpx.TransportError, AnswerRefused) as error:
                came = error
