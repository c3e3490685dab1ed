"""Search for the slowest image that a thread would decode: `python -m … SECONDS SEED`.

Each format has a population of number lists. A list is changed, its image built, and kept where its
image is taken by a thread and costs more processor time than others. Runs in a process of its own,
since a decoder may crash; prints one JSON document.
"""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from dne_serve.inference.decoding import SMALL_BYTES, SMALL_PIXELS, is_cheap
from dne_serve.inference.image_outline import read_outline
from model_store.errors import ImageRejected
from model_store.preprocess import read_pixels
from model_store.records.manifest import Preprocessing
from tests.abuse.random_structures import BUILDERS, Draws

PREPROCESSING = Preprocessing(image_size=224)
NUMBERS = 40
KEPT = 24
AGAIN = 3
MOST_TRIED = 200_000
BUSY = 2
"""Seconds are of processor time; on a busy machine a search ends after this many times as many."""
SHARES = {"JPEG": 10, "PNG": 10, "WEBP": 10, "GIF": 5, "BMP": 4, "TIFF": 1}
"""Of the time. No thread ever decodes a TIFF, so that there is little to find."""


@dataclass(frozen=True, slots=True)
class Found:
    """An image that a thread decodes, by its numbers and its cost."""

    cpu_s: float = 0.0
    size_bytes: int = 0
    numbers: tuple[int, ...] = ()

    @property
    def cpu_a_byte(self) -> float:
        return self.cpu_s / max(1, self.size_bytes)


@dataclass(slots=True)
class Tally:
    tried: int = 0
    in_threads: int = 0
    slowest: Found = field(default_factory=Found)
    slowest_a_byte: Found = field(default_factory=Found)
    slowest_outline_s: float = 0.0


def search(kind: str, *, seconds: float, seed: int, most: int = MOST_TRIED) -> Tally:
    chance, tally = random.Random(f"{kind} {seed}"), Tally()
    population: list[Found] = []
    until, latest = time.process_time() + seconds, time.monotonic() + BUSY * seconds
    while time.process_time() < until and time.monotonic() < latest and tally.tried < most:
        numbers = _changed(chance, population)
        try:
            data = BUILDERS[kind](Draws(numbers))
        except OSError:  # Pillow's encoders cannot write every combination of options
            continue
        found = _tried(data, numbers, tally, worth=population[-1].cpu_s if population else 0.0)
        if found is None:
            continue
        population = sorted([*population, found], key=lambda one: -one.cpu_s)[:KEPT]
        tally.slowest = population[0]
        tally.slowest_a_byte = max(tally.slowest_a_byte, found, key=lambda one: one.cpu_a_byte)
    return tally


def _tried(data: bytes, numbers: tuple[int, ...], tally: Tally, *, worth: float) -> Found | None:
    """The cost of an image that a thread would take; the least of several, where it is high."""
    tally.tried += 1
    began = time.thread_time()
    outline = read_outline(data)
    tally.slowest_outline_s = max(tally.slowest_outline_s, time.thread_time() - began)
    if len(data) > SMALL_BYTES or not is_cheap(outline, size_bytes=len(data)):
        return None
    tally.in_threads += 1
    cpu_s = _decoding_s(data)
    if cpu_s > worth:
        cpu_s = min(cpu_s, *(_decoding_s(data) for _ in range(AGAIN - 1)))
    return Found(cpu_s, len(data), numbers)


def _decoding_s(data: bytes) -> float:
    began = time.thread_time()
    with suppress(ImageRejected):  # a refusal costs time as well
        read_pixels(data, PREPROCESSING, max_pixels=SMALL_PIXELS)
    return time.thread_time() - began


def _changed(chance: random.Random, population: list[Found]) -> tuple[int, ...]:
    """New numbers, or those of a slow image with a few of them changed."""
    if not population or chance.random() < 0.3:
        return tuple(chance.getrandbits(32) for _ in range(NUMBERS))
    numbers = list(chance.choice(population).numbers)
    other = chance.choice(population).numbers
    if chance.random() < 0.3:
        cut = chance.randrange(NUMBERS)
        numbers[cut:] = other[cut:]
    for _ in range(chance.choice([1, 1, 2, 4])):
        numbers[chance.randrange(NUMBERS)] = chance.getrandbits(32)
    return tuple(numbers)


def main(arguments: list[str]) -> None:
    seconds, seed = float(arguments[0]) / sum(SHARES.values()), int(arguments[1])
    tallies = {
        kind: asdict(search(kind, seconds=share * seconds, seed=seed))
        for kind, share in SHARES.items()
    }
    print(json.dumps(tallies))


if __name__ == "__main__":
    main(sys.argv[1:])
