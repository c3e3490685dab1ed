"""Start `dne-serve` with an engine that its options cannot name:
`python -m benchmarks.serving.hand_made onnx packed 2 --store …`. For benchmarks that compare the
server's own choice with others."""

from __future__ import annotations

import sys

from dne_serve import cli, engine_start
from dne_serve.engines.base import Engine
from dne_serve.engines.choose import Choosing, choose_engine
from dne_serve.settings import Settings


def main(backend: str, weights: str, workers: str, *options: str) -> int:
    def hand_made(settings: Settings, choosing: Choosing | None) -> Engine:
        return choose_engine(
            backend,
            device="cpu",
            threads=settings.threads,
            max_batch=settings.max_batch,
            precision=settings.precision,
            workers=int(workers),
            pack=weights == "packed",
        )

    engine_start.make_engine = hand_made
    return cli.main(["--backend", backend, *options])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
