"""Find the kept images that are nearest to an image in embedding space: why a version answers so.

Candidates are the most typical kept images of the likeliest classes. They are read from the store
at every question, so an image that was forgotten or corrected is not named again; only their
embeddings are kept, in memory and for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from dne_serve.engines.base import Floats, Resident
from dne_serve.engines.scored import Scored
from dne_serve.errors import Malformed
from dne_serve.inference.answers import best_of
from dne_serve.inference.decoding import EncodedImage
from dne_serve.inference.predictor import Predictor
from dne_serve.inference.store_threads import StoreThreads
from dne_serve.rollout.canary import Chosen
from model_store.errors import KeptTooLarge
from model_store.loop.corrections import KeptImage, kept_images
from model_store.records.manifest import Manifest
from model_store.store.store import Store

MAX_WHY = 10
MAX_IMAGES = 8
"""Images of a request that may be asked about: each brings candidates of its own."""
_CLASSES = 3
_CANDIDATES = 8
"""Classes of an image, and kept images of each class, that are compared."""
_MOST_CLASSES = 500
_KEPT_S = 600.0


class Near(TypedDict):
    """A kept image, its class, and the cosine of the two embeddings."""

    label: str
    similarity: float
    image: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Embeddings of the kept images of a class, by digest."""

    read_s: float
    by_image: dict[str, Floats]


class NearestKept:
    """Finds kept images that look alike. Used on the event loop."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        *,
        predictor: Predictor,
        readers: StoreThreads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_store = open_store
        self._predictor = predictor
        self._readers = readers
        self._clock = clock
        self._known: dict[tuple[str, str], _Known] = {}
        self._filling = asyncio.Lock()
        """Held while embeddings are computed: two questions at once do not compute them twice."""

    async def of(
        self, resident: Resident, scored: Sequence[Scored], *, count: int
    ) -> list[list[Near]]:
        """Find the `count` nearest kept images of each image that was scored with its token."""
        if len(scored) > MAX_IMAGES:
            raise Malformed(f"why is for at most {MAX_IMAGES} images of a request")
        likely = [
            [resident.labels[place] for place in best_of(one.probabilities, _CLASSES).tolist()]
            for one in scored
        ]
        candidates: dict[str, list[tuple[KeptImage, Floats]]] = {}
        async with self._filling:
            self._drop_old()
            for label in dict.fromkeys(label for labels in likely for label in labels):
                candidates[label] = await self._candidates(resident, label)
        return [
            _nearest(one, [pair for label in labels for pair in candidates[label]], count=count)
            for one, labels in zip(scored, likely, strict=True)
        ]

    async def _candidates(self, resident: Resident, label: str) -> list[tuple[KeptImage, Floats]]:
        images = await self._readers.run(lambda: self._read(resident.manifest, label))
        key = (resident.manifest.experts[0].sha256, label)
        before = self._known.pop(key, None)
        known = before.by_image if before else {}
        missing = [one for one in images if one.sha256 not in known]
        if missing:
            pictures = [EncodedImage(filename=one.name, data=one.data) for one in missing]
            asked = Chosen(resident=resident, by="asked")
            answers = await self._predictor.score(
                asked, pictures=pictures, is_traffic=False, wants_tokens=True
            )
            found = zip(missing, answers, strict=True)
            known = known | {one.sha256: _unit(answer.token) for one, answer in found}
        # Those that are not there any more are let go.
        left = {one.sha256: known[one.sha256] for one in images}
        read_s = before.read_s if before and not missing else self._clock()
        self._known[key] = _Known(read_s=read_s, by_image=left)
        while len(self._known) > _MOST_CLASSES:
            del self._known[next(iter(self._known))]
        return [(one, left[one.sha256]) for one in images]

    def _read(self, manifest: Manifest, label: str) -> list[KeptImage]:
        """Read the most typical kept images of a class: the first ones to learn from."""
        try:
            kept = list(kept_images(self._open_store(), manifest, label))
        except KeptTooLarge:
            return []
        return kept[:_CANDIDATES]

    def _drop_old(self) -> None:
        before = self._clock() - _KEPT_S
        self._known = {key: one for key, one in self._known.items() if one.read_s >= before}


def _nearest(
    scored: Scored, candidates: Sequence[tuple[KeptImage, Floats]], *, count: int
) -> list[Near]:
    own = _unit(scored.token)
    found = [
        Near(
            label=image.entry.class_name,
            similarity=round(float(own @ unit), 4),
            image=image.sha256,
            name=image.name,
        )
        for image, unit in candidates
    ]
    return sorted(found, key=lambda near: -near["similarity"])[:count]


def _unit(token: Floats | None) -> Floats:
    assert token is not None, "it was scored with its token"
    length = float(np.linalg.norm(token))
    return (token / length if length else token).astype(np.float32)
