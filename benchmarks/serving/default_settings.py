"""`dne-serve` without options beside the best engine made by hand, and beside torch, in turns.

Every other server runs with ours, and both are asked in turns (`compare.py`). Figures are requests
a second at 1, 8 and 32 connections, of the version that `python -m benchmarks.serving` learns,
in the precision that each engine takes by itself. Takes about ten minutes.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from statistics import geometric_mean

from benchmarks.figures import Figure, at_least, print_figures
from benchmarks.serving.compare import CONNECTIONS, Sessions, compare, learn_a_version
from benchmarks.serving.servers import Server, ours
from dne_serve.engines.candidates import CANDIDATES, Candidate

ASKED = 0.97
DEFAULT = Server(name="no options", command=("dne-serve", "--store", "{store}", "--port", "{port}"))
TORCH = ours("torch, the earlier default", "--backend", "torch")


def hand_made(one: Candidate) -> Server:
    return Server(
        name=f"by hand: {one.name}",
        command=(
            *("python", "-m", "benchmarks.serving.hand_made", one.name),
            *("--store", "{store}", "--port", "{port}"),
        ),
    )


BY_HAND = tuple(hand_made(one) for one in CANDIDATES if one.backend == "onnx")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument("--turns", type=int, default=5, help="that each server takes")
    parser.add_argument("--seconds", type=float, default=2.5, help="of load in a turn")
    options = parser.parse_args()
    # As Ctrl-C does: the server under test must not stay behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, image = learn_a_version(folder, epochs=2)  # speed does not depend on what it learnt
        sessions = compare(
            (DEFAULT,),
            (TORCH, *BY_HAND),
            store=store,
            image=image,
            folder=folder,
            turns=options.turns,
            seconds=options.seconds,
        )
    figures = [judged(sessions, connections) for connections in CONNECTIONS]
    print_figures(figures, measured=_measured(sessions), as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def best_by_hand(sessions: Sessions) -> str:
    """Name the setting that is fastest over all loads, each beside its own turns of ours."""

    def share(other: Server) -> float:
        return geometric_mean(sessions.ratio(DEFAULT.name, other.name, one) for one in CONNECTIONS)

    return min((TORCH, *BY_HAND), key=share).name


def judged(sessions: Sessions, connections: int) -> Figure:
    best = best_by_hand(sessions)
    ratio = sessions.ratio(DEFAULT.name, best, connections)
    return at_least(f"no options ÷ {best}, {connections} connections", ratio, ASKED)


def _measured(sessions: Sessions) -> dict[str, float]:
    return {
        f"requests/s, {name}, {connections} connections": sessions.rate(name, connections)
        for name in (TORCH.name, *(one.name for one in BY_HAND), DEFAULT.name)
        for connections in CONNECTIONS
    }


if __name__ == "__main__":
    sys.exit(main())
