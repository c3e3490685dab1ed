"""Take a request from its images to logits: resolve the version, decode, queue, run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from dne_serve.engines.base import Answer, Answers, Query, Resident, Watch, joined
from dne_serve.errors import Malformed, NotReady, TooOld
from dne_serve.inference.answers import Scored
from dne_serve.inference.deadline import Deadline
from dne_serve.inference.decoding import Decoder, Picture
from dne_serve.inference.store_threads import Loads
from dne_serve.rollout.answer_counts import AnswerCounts
from dne_serve.rollout.canary import By, Chosen, Companions
from dne_serve.rollout.guard import Guard
from dne_serve.rollout.residents import ImageBatcher, Residents
from dne_serve.rollout.statistics import Statistics
from dne_serve.tracing.spans import CURRENT
from model_store.errors import DneError, ImageRejected
from model_store.preprocess import Pixels
from model_store.store.store import Store

log = logging.getLogger("dne_serve.predictor")

OnCompared = Callable[[int, Sequence[str | None]], None]


class Predictor:
    """Leads requests through decoder and batcher. Used on the event loop."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        *,
        residents: Residents,
        companions: Companions,
        batcher: ImageBatcher,
        decoder: Decoder,
        guard: Guard,
        statistics: Statistics,
        max_wait_s: float,
        wants_tokens: bool = False,
        on_answered: Callable[[By, int], None] = lambda by, images: None,
        on_compared: Callable[[By, int, int], None] = lambda by, same, other: None,
        counts: AnswerCounts | None = None,
    ) -> None:
        self._open_store = open_store
        self._residents = residents
        self._companions = companions
        self._batcher = batcher
        self._decoder = decoder
        self._loads = Loads(self._load)
        self._guard = guard
        self._statistics = statistics
        self._max_wait_s = max_wait_s
        self._wants_tokens = wants_tokens
        self._on_answered = on_answered
        self._on_compared = on_compared
        self._counts = AnswerCounts() if counts is None else counts
        self._comparing: set[asyncio.Task[None]] = set()
        self._decoding = 0  # touched on the event loop only

    async def resolve(self, version: int | None, *, at_least: int | None = None) -> Chosen:
        """Choose the one version that answers a request, whatever the channel does meanwhile.
        `at_least` is the oldest that may."""
        if version is None:
            served = self._residents.served
            if served is None:
                raise NotReady("no version is served yet")
            if at_least is not None and served.version < at_least:
                raise TooOld(
                    f"version {served.version} is served here, and version {at_least} or a younger "
                    "one was asked for"
                )
            return self._companions.choose(served, at_least=at_least or 0)
        if at_least is not None and version < at_least:
            raise Malformed(f"version {version} was asked for, and at least version {at_least}")
        found = self._residents.find_version(version)
        if found is None:
            found = await self._loads.get(version, deadline=Deadline(self._max_wait_s))
        return Chosen(resident=found, by="asked")

    async def load(self, version: int) -> None:
        """Load a version into memory, without a deadline."""
        if self._residents.find_version(version) is None:
            await self._loads.get(version)

    def stop(self) -> None:
        """Wait for a load under way, which needs the engine to finish."""
        self._loads.stop()

    def expect_room(self) -> None:
        """Raise QueueFull where not even one image would be taken. Call it before a body is read,
        so that a refusal costs little."""
        self._check_room(1)

    async def score(
        self,
        chosen: Chosen,
        *,
        pictures: Sequence[Picture],
        since: float | None = None,
        on_compared: OnCompared | None = None,
        is_traffic: bool = True,
    ) -> list[Scored]:
        """Compute the logits and the doubt of the version that answers, for each picture in order.
        `since`: the moment when the request had arrived, if that was earlier. `on_compared` gets
        the version that the answers are compared with, now or later, and its label for each picture
        if it is another one. `is_traffic` is false for pictures that were chosen because they are
        doubtful: the guard and the counts of answers leave them out."""
        resident, version = chosen.resident, chosen.resident.version
        trace = CURRENT.get()
        if trace is not None:
            trace.answers(version, images=len(pictures))
        with self._statistics.request(version, images=len(pictures)):
            deadline = Deadline(self._max_wait_s, since=since)
            with self._statistics.decoding(version):
                pixels = await deadline.result(self._decode(resident, pictures))
            with self._guard.request(version):  # decoding is no work of the version's
                answers = await self._ask(chosen, pixels, deadline, on_compared)
        scored = [Scored.of(resident, one) for one in answers]
        if not is_traffic:
            return scored
        unknown = sum(one.is_unknown for one in scored)
        self._guard.answered(version, images=len(scored), unknown=unknown)
        self._on_answered(chosen.by, len(scored))
        self._counts.count(resident, logits=[one.logits for one in scored], unknown=unknown)
        return scored

    async def _ask(
        self,
        chosen: Chosen,
        pixels: Sequence[Pixels],
        deadline: Deadline,
        on_compared: OnCompared | None,
    ) -> list[Answer]:
        """Compute the answers of the version that answers. A shadow of the same lineage is computed
        in the same pass, any other shadow in a pass after the answer."""
        resident, shadow = chosen.resident, chosen.shadow
        wider = joined(resident, shadow) if shadow else None
        if shadow and wider:
            tickets = self._submit(wider, pixels, (resident, shadow), watch=CURRENT.get())
            both = await deadline.answers(tickets)
            answers = [_given(own) for own, _ in both]
            self._compare(chosen, answers, [other for _, other in both], on_compared)
            return answers
        own = self._submit(resident, pixels, (resident,), watch=CURRENT.get())
        alone = await deadline.answers(own)
        answers = [_given(own) for (own,) in alone]
        if shadow:
            apart = self._ask_apart(chosen, shadow, answers, pixels, on_compared)
            task = asyncio.create_task(apart)
            self._comparing.add(task)  # the event loop itself holds on to no task
            task.add_done_callback(self._comparing.discard)
        return answers

    def _submit(
        self,
        widest: Resident,
        pixels: Sequence[Pixels],
        residents: tuple[Resident, ...],
        *,
        watch: Watch | None = None,
    ) -> list[Future[Answers]]:
        queries = [
            Query(pixels=one, residents=residents, wants_token=self._wants_tokens, watch=watch)
            for one in pixels
        ]
        return self._batcher.submit(widest, items=queries)

    async def _ask_apart(
        self,
        chosen: Chosen,
        shadow: Resident,
        answers: Sequence[Answer],
        pixels: Sequence[Pixels],
        on_compared: OnCompared | None,
    ) -> None:
        try:
            tickets = self._submit(shadow, pixels, (shadow,))
            others = await asyncio.gather(*map(asyncio.wrap_future, tickets))
        except DneError as error:  # nobody waits for it
            log.debug("the shadow was not asked: %s", error)
            return
        self._compare(chosen, answers, [one for (one,) in others], on_compared)

    def _compare(
        self,
        chosen: Chosen,
        answers: Sequence[Answer],
        others: Sequence[Answer | None],
        on_compared: OnCompared | None,
    ) -> None:
        resident, shadow = chosen.resident, chosen.shadow
        assert shadow is not None  # nobody else compares
        pairs = [
            (_label(resident, own), None if other is None else _label(shadow, other))
            for own, other in zip(answers, others, strict=True)
        ]
        same = sum(own == other for own, other in pairs)
        self._on_compared(chosen.by, same, len(answers) - same)
        if on_compared is not None:
            on_compared(shadow.version, [None if own == other else other for own, other in pairs])

    def _load(self, version: int) -> Resident:
        store = self._open_store()
        return self._residents.load(store.read_manifest(version), shards=store)

    def _check_room(self, images: int) -> None:
        self._batcher.check_room(self._decoding + images)  # images in decoding count

    async def _decode(self, resident: Resident, pictures: Sequence[Picture]) -> list[Pixels]:
        """Decode all images, or raise the first error. An image in decoding counts as queued and
        gives up its place when decoded, so that slow images do not hold the places of fast ones."""
        self._check_room(len(pictures))
        self._decoding += len(pictures)
        held = len(pictures)

        async def read(picture: Picture) -> Pixels:
            nonlocal held
            try:
                return await picture.read(self._decoder, resident.manifest.preprocessing)
            finally:
                held -= 1
                self._decoding -= 1

        try:
            results = await _outcomes([read(picture) for picture in pictures])
        finally:
            self._decoding -= held  # of images whose reading was cancelled before it began
        return [
            _checked(result, place=place, of=len(pictures), filename=picture.filename)
            for place, (picture, result) in enumerate(zip(pictures, results, strict=True), start=1)
        ]


async def _outcomes(
    reading: Sequence[Coroutine[Any, Any, Pixels]],
) -> Sequence[Pixels | BaseException]:
    if len(reading) == 1:
        try:  # without a task of its own
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
