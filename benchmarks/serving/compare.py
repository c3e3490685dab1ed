"""Servers side by side: each other one runs with ours, and they are asked in turns of seconds.

The speed of a shared machine changes within minutes, so only what happens within seconds of each
other is compared: a ratio is the median of the ratios of neighbouring turns.
"""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from PIL import Image

from benchmarks.serving.load import Seen, Traffic
from benchmarks.serving.servers import Running, Server, running
from dne_client.demo.story import write_demo_data

CONNECTIONS = (1, 8, 32)
IMAGE_SIZE = 32
SETTLE_S = 0.5
"""Of every turn, before what is seen counts."""

Turn = dict[str, Seen]
"""What was seen of each server, by name, one right after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """The turns that each other server has taken with ours, by connections."""

    turns: dict[tuple[str, int], list[Turn]] = field(default_factory=dict)

    @property
    def others(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.turns))

    def ratio(self, ours: str, other: str, connections: int) -> float:
        """Requests a second of ours ÷ the other's."""
        return median(
            turn[ours].per_second / turn[other].per_second
            for turn in self.turns[other, connections]
        )

    def rate(self, name: str, connections: int, *, beside: str | None = None) -> float:
        """Requests a second, over all turns or those in one session."""
        return median(seen.per_second for seen in self._seen(name, connections, beside))

    def quantile_s(self, name: str, connections: int, share: float) -> float:
        """The median over sessions: of one, all turns count together."""
        return median(
            _together([turn[name] for turn in turns]).quantile_s(share)
            for (_, count), turns in self.turns.items()
            if count == connections and name in turns[0]
        )

    def failed(self, name: str, connections: int) -> int:
        return sum(seen.failed for seen in self._seen(name, connections, None))

    def _seen(self, name: str, connections: int, beside: str | None) -> Iterator[Seen]:
        for (other, count), turns in self.turns.items():
            if count == connections and beside in (None, other):
                yield from (turn[name] for turn in turns if name in turn)


def compare(
    ours: Sequence[Server],
    others: Sequence[Server],
    *,
    store: Path,
    image: bytes,
    folder: Path,
    turns: int,
    seconds: float,
) -> Sessions:
    sessions = Sessions()
    for other in others:
        with ExitStack() as stack:
            lives = [
                stack.enter_context(running(one, store=store, folder=folder, image=image))
                for one in (*ours, other)
            ]
            for connections in CONNECTIONS:
                sessions.turns[other.name, connections] = [
                    {
                        live.server.name: ask(
                            live, connections=connections, folder=folder, seconds=seconds
                        )
                        for live in lives
                    }
                    for _ in range(turns)
                ]
                _tell(sessions, other.name, connections)
    return sessions


def ask(
    live: Running, *, connections: int, folder: Path, seconds: float, settle_s: float = SETTLE_S
) -> Seen:
    """What a client saw after it had settled. The others wait meanwhile."""
    traffic = Traffic(
        live.request,
        port=live.port,
        folder=folder,
        connections=connections,
        seconds=settle_s + seconds,
    )
    seen = traffic.seen()
    began_s = min((one.began_s for one in seen.replies), default=time.monotonic())
    return seen.between(began_s + settle_s, float("inf"))


def _together(parts: Sequence[Seen]) -> Seen:
    return Seen(
        replies=tuple(one for part in parts for one in part.replies),
        unsent=sum(part.unsent for part in parts),
        processor_s=sum(part.processor_s for part in parts),
    )


def _tell(sessions: Sessions, other: str, connections: int) -> None:
    rates = {
        name: [turn[name].per_second for turn in sessions.turns[other, connections]]
        for name in sessions.turns[other, connections][0]
    }
    told = "; ".join(
        f"{name} {' '.join(f'{one:.0f}' for one in rate)}" for name, rate in rates.items()
    )
    print(f"{connections} connections, requests/s: {told}", file=sys.stderr)


def learn_a_version(folder: Path, *, epochs: int = 10) -> tuple[Path, bytes]:
    """Digits in the `paper` preset: 10.7 million parameters, images of 32 pixels."""
    data, store = write_demo_data(folder / "data"), folder / "models"
    program = Path(sys.executable).with_name("dne-train")
    told = ("--data", data.train("digits-0-4"), "--store", store, "--preset", "paper")
    command = [program, "add-task", *told, "--epochs", str(epochs), "--augment", "none", "--force"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return store, png_of(next(iter(data.test_images())))


def png_of(path: Path) -> bytes:
    """As large as the network sees it."""
    data = io.BytesIO()
    Image.open(path).resize((IMAGE_SIZE, IMAGE_SIZE)).save(data, "PNG")
    return data.getvalue()
