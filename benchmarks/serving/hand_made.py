"""Start `dne-serve` with an engine that its options cannot name:
`python -m benchmarks.serving.hand_made "onnx fp32, packed weights" --store …`. For benchmarks that
compare the server's own choice with others."""

from __future__ import annotations

import sys

from dne_serve import cli, engine_start
from dne_serve.engines.base import Engine
from dne_serve.engines.candidates import CANDIDATES
from dne_serve.engines.choose import make_candidate
from dne_serve.settings import Settings


def main(name: str, *options: str) -> int:
    one = next(one for one in CANDIDATES if one.name == name)

    def hand_made(settings: Settings) -> tuple[Engine, None]:
        engine = make_candidate(
            one, threads=settings.threads, max_batch=settings.max_batch, choice="made by hand"
        )
        return engine, None

    engine_start.start_engine = hand_made
    return cli.main(list(options))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
