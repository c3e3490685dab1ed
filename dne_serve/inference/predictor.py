"""Take a request from its images to logits: resolve the version, decode, queue, run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from fastapi import Request

from dne_serve.access.auth import Rate
from dne_serve.engines.base import Answer, Answers, Query, Resident, joined
from dne_serve.engines.scored import Scored
from dne_serve.errors import Malformed, NotReady, TooOld
from dne_serve.inference.decoding import Decoder, FairTurns, Picture
from dne_serve.inference.store_threads import Deadline, Loads
from dne_serve.observe.events import CURRENT, Answered, Compared, Events, Times
from dne_serve.rollout.canary import CanaryAndShadow, Chosen
from dne_serve.rollout.loaded_versions import ImageBatcher, ImageFlow, LoadedVersions
from model_store.errors import DneError, ImageRejected
from model_store.preprocess import Pixels
from model_store.records.sealing import MAX_VERSION
from model_store.store.store import Store

HEADER = "Dne-At-Least"
AT_LEAST_PARAMETER: dict[str, Any] = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_VERSION},
    "description": "The oldest version that may answer. A server that serves an older one answers "
    "503, and the client asks again or asks another server.",
}


def at_least_of(request: Request) -> int | None:
    """Return the oldest version that may answer a request; None: any."""
    text = request.headers.get(HEADER)
    if text is None:
        return None
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_VERSION))
    if not is_number or not 1 <= int(text) <= MAX_VERSION:
        raise Malformed(f"{HEADER} is the number of a version, not {text[:100]!r}")
    return int(text)


log = logging.getLogger("dne_serve.predictor")

OnCompared = Callable[[int, Sequence[str | None]], None]


class Predictor:
    """Leads requests through decoder and batcher. Used on the event loop."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        *,
        loaded: LoadedVersions,
        canary_and_shadow: CanaryAndShadow,
        batcher: ImageBatcher,
        flow: ImageFlow,
        decoder: Decoder,
        events: Events,
        max_wait_s: float,
        wants_tokens: bool = False,
        turns: FairTurns | None = None,
        rate: float | None = None,
    ) -> None:
        """With `turns`, the model decodes in turn with others. `rate` is the requests in a second
        that it takes."""
        self._turns = turns
        self._rate = None if rate is None else Rate(rate, whose="this model may be asked")
        self._open_store = open_store
        self._loaded = loaded
        self._canary_and_shadow = canary_and_shadow
        self._batcher = batcher
        self._flow = flow
        self._decoder = decoder
        self._events = events
        self._max_wait_s = max_wait_s
        self._wants_tokens = wants_tokens
        self._loads = Loads(self._load)
        self._comparing: set[asyncio.Task[None]] = set()

    async def resolve(self, version: int | None, *, at_least: int | None = None) -> Chosen:
        """Choose the one version that answers a request, whatever the channel does meanwhile. No
        version older than `at_least` may answer."""
        if version is None:
            served = self._loaded.served
            if served is None:
                raise NotReady("no version is served yet")
            if at_least is not None and served.version < at_least:
                raise TooOld(
                    f"version {served.version} is served here, and version {at_least} or a younger "
                    "one was asked for"
                )
            return self._canary_and_shadow.choose(served, at_least=at_least or 0)
        if at_least is not None and version < at_least:
            raise Malformed(f"version {version} was asked for, and at least version {at_least}")
        resident = self._loaded.find_version(version)
        if resident is None:
            resident = await self._loads.get(version, deadline=Deadline(self._max_wait_s))
        return Chosen(resident=resident, by="asked")

    async def load(self, version: int) -> None:
        """Load a version into memory, without a deadline."""
        if self._loaded.find_version(version) is None:
            await self._loads.get(version)

    def stop(self) -> None:
        """Wait for a load under way, which needs the engine to finish."""
        self._loads.stop()

    def expect_room(self) -> None:
        """Raise QueueFull if the queue has no place for a single image, or RateExceeded. Call it
        before a body is read, so that a refusal costs little."""
        if self._rate is not None:
            self._rate.spend()
        self._batcher.reserve(1, flow=self._flow).release()

    async def score(
        self,
        chosen: Chosen,
        *,
        pictures: Sequence[Picture],
        since: float | None = None,
        on_compared: OnCompared | None = None,
        is_traffic: bool = True,
        wants_tokens: bool = False,
    ) -> list[Scored]:
        """Score each picture in order by the version that answers, and emit `Answered`.

        `since` is the moment when the request arrived, if that was earlier. `on_compared` gets the
        version that the answers are compared with, now or later, and its label for each picture if
        it is another one. `is_traffic` is false for pictures that were chosen because they are
        doubtful: the guard and the counts of answers leave them out. With `wants_tokens` the
        answers have their tokens, also where the server collects nothing.
        """
        began_ns = time.perf_counter_ns()
        decoding: Times | None = None

        def emit(*, scored: Sequence[Scored] = (), error: Exception | None = None) -> None:
            event = Answered(
                resident=chosen.resident,
                by=chosen.by,
                images=len(pictures),
                times=_since(began_ns),
                decoding=decoding,
                scored=tuple(scored),
                error=error,
                is_traffic=is_traffic,
            )
            self._events.answered(event)

        try:
            deadline = Deadline(self._max_wait_s, since=since)
            pixels = await deadline.result(self._decode(chosen.resident, pictures))
            decoding = _since(began_ns)
            answers = await self._ask(
                chosen, pixels, deadline, on_compared, wants_tokens=wants_tokens
            )
        except Exception as error:
            emit(error=error)
            raise
        scored = [Scored.of(chosen.resident, answer) for answer in answers]
        emit(scored=scored)
        return scored

    async def _ask(
        self,
        chosen: Chosen,
        pixels: Sequence[Pixels],
        deadline: Deadline,
        on_compared: OnCompared | None,
        *,
        wants_tokens: bool,
    ) -> list[Answer]:
        """Compute the answers of the chosen version. A shadow of the same lineage is computed in
        the same pass. Any other shadow is computed in a pass after the answer."""
        resident, shadow = chosen.resident, chosen.shadow
        wider = joined(resident, shadow) if shadow else None
        if shadow and wider:
            tickets = self._submit(wider, pixels, (resident, shadow), wants_tokens=wants_tokens)
            both = await deadline.answers(tickets)
            answers = [_given(own) for own, _ in both]
            self._compare(chosen, answers, [other for _, other in both], on_compared)
            return answers
        own = self._submit(resident, pixels, (resident,), wants_tokens=wants_tokens)
        alone = await deadline.answers(own)
        answers = [_given(own) for (own,) in alone]
        if shadow:
            apart = self._ask_apart(chosen, shadow, answers, pixels, on_compared)
            task = asyncio.create_task(apart)
            self._comparing.add(task)  # the event loop keeps no reference to a task
            task.add_done_callback(self._comparing.discard)
        return answers

    def _submit(
        self,
        widest: Resident,
        pixels: Sequence[Pixels],
        residents: tuple[Resident, ...],
        *,
        is_traced: bool = True,
        wants_tokens: bool = False,
    ) -> list[Future[Answers]]:
        watch = CURRENT.get() if is_traced else None
        wants = wants_tokens or self._wants_tokens
        queries = [
            Query(pixels=image, residents=residents, wants_token=wants, watch=watch)
            for image in pixels
        ]
        return self._batcher.submit(widest, items=queries, flow=self._flow)

    async def _ask_apart(
        self,
        chosen: Chosen,
        shadow: Resident,
        answers: Sequence[Answer],
        pixels: Sequence[Pixels],
        on_compared: OnCompared | None,
    ) -> None:
        try:
            tickets = self._submit(shadow, pixels, (shadow,), is_traced=False)
            others = await asyncio.gather(*map(asyncio.wrap_future, tickets))
        except DneError as error:  # no client waits for the shadow
            log.debug("the shadow was not asked: %s", error)
            return
        self._compare(chosen, answers, [answer for (answer,) in others], on_compared)

    def _compare(
        self,
        chosen: Chosen,
        answers: Sequence[Answer],
        others: Sequence[Answer | None],
        on_compared: OnCompared | None,
    ) -> None:
        resident, shadow = chosen.resident, chosen.shadow
        assert shadow is not None  # only requests with a shadow compare
        pairs = [
            (_label(resident, own), None if other is None else _label(shadow, other))
            for own, other in zip(answers, others, strict=True)
        ]
        same = sum(own == other for own, other in pairs)
        self._events.compared(Compared(by=chosen.by, same=same, other=len(answers) - same))
        if on_compared is not None:
            on_compared(shadow.version, [None if own == other else other for own, other in pairs])

    def _load(self, version: int) -> Resident:
        store = self._open_store()
        return self._loaded.load(store.read_manifest(version), shards=store)

    async def _decode(self, resident: Resident, pictures: Sequence[Picture]) -> list[Pixels]:
        """Decode all images, or raise the first error. An image has a place in the queue until it
        is decoded, so that slow images do not hold the places of fast ones."""
        places = self._batcher.reserve(len(pictures), flow=self._flow)

        async def read(picture: Picture) -> Pixels:
            try:
                if self._turns is None:
                    return await picture.read(self._decoder, resident.manifest.preprocessing)
                async with self._turns.turn(self._flow):
                    return await picture.read(self._decoder, resident.manifest.preprocessing)
            finally:
                places.release_one()

        try:
            results = await _outcomes([read(picture) for picture in pictures])
        finally:
            places.release()  # of images whose reading was cancelled before it began
        return [
            _checked(result, place=place, of=len(pictures), filename=picture.filename)
            for place, (picture, result) in enumerate(zip(pictures, results, strict=True), start=1)
        ]


def _since(began_ns: int) -> Times:
    return Times(began_ns=began_ns, ended_ns=time.perf_counter_ns())


async def _outcomes(
    reading: Sequence[Coroutine[Any, Any, Pixels]],
) -> Sequence[Pixels | BaseException]:
    if len(reading) == 1:
        try:  # one image needs no task of its own
            return [await reading[0]]
        except Exception as error:
            return [error]
    outcomes: list[Pixels | BaseException] = await asyncio.gather(*reading, return_exceptions=True)
    return outcomes


def _given(answer: Answer | None) -> Answer:
    assert answer is not None  # the engine fails a ticket whose own version is unusable
    return answer


def _label(resident: Resident, answer: Answer) -> str:
    return resident.labels[answer.logits.argmax()]


def _checked(
    result: Pixels | BaseException, *, place: int, of: int, filename: str | None
) -> Pixels:
    if isinstance(result, ImageRejected):
        name = f" ({filename[:200]!r})" if filename else ""
        raise type(result)(f"image {place} of {of}{name}: {result}") from result
    if isinstance(result, BaseException):
        raise result
    return result
