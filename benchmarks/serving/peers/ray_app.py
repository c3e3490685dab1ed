"""Ray Serve with its request batching, one replica."""

from __future__ import annotations

import os
import signal
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.serving.peers.model import MAX_BATCH, Classifier


@serve.deployment(num_replicas=1, max_ongoing_requests=100, ray_actor_options={"num_cpus": 1})
class Service:
    def __init__(self) -> None:
        self.classifier = Classifier()

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=0.002)
    async def classify(self, images: list[bytes]) -> list[dict[str, Any]]:
        return self.classifier.classify([self.classifier.decode(one) for one in images])

    async def __call__(self, request: Request) -> dict[str, Any]:
        answer: dict[str, Any] = await self.classify(await request.body())
        return answer


if __name__ == "__main__":
    variables = {name: os.environ[name] for name in ("BENCH_STORE", "BENCH_THREADS", "PYTHONPATH")}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {**variables, "OMP_NUM_THREADS": variables["BENCH_THREADS"]}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["BENCH_PORT"])})
    serve.run(Service.bind(), route_prefix="/")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()
