"""The parts of a running server, put together; started and stopped in the right order."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

from dne_serve.auth import AdminDoor
from dne_serve.companions import Companions
from dne_serve.engine import Engine, joined
from dne_serve.metrics import Metrics
from dne_serve.predictor import Predictor
from dne_serve.problems import NotServed, tell
from dne_serve.reloader import Reloader
from dne_serve.residents import ImageBatcher, Limits, Residents
from dne_serve.schemas import MovedAnswer
from dne_serve.settings import Settings
from model_store.channel import ChannelRecord
from model_store.store import Store


class Serving:
    def __init__(self, settings: Settings, *, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = Metrics()
        self.admin = AdminDoor(settings.read_admin_token())
        # Failures are not cached: a store that is absent is looked for again.
        self.open_store = functools.cache(functools.partial(Store.open, settings.store))
        self._decoders = ThreadPoolExecutor(settings.decode_threads, "decode")
        self._loaders = ThreadPoolExecutor(1, "load")
        self.batcher = ImageBatcher(
            engine.run,
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            on_batch=self.metrics.ran,
            join=joined,
        )
        trust = settings.read_trust()
        self.residents = Residents(
            engine,
            batcher=self.batcher,
            limits=Limits(
                spare=settings.max_resident,
                max_bytes=settings.max_model_bytes,
                idle_s=settings.idle_seconds,
            ),
            admit=trust.check if trust else None,
        )
        self.companions = Companions(
            settings.read_canary(), settings.shadow, residents=self.residents
        )
        self.reloader = Reloader(
            self.open_store,
            residents=self.residents,
            beside=lambda: self.companions.load(self.open_store),
            channel=settings.channel,
            poll_s=settings.poll_seconds,
            on_swap=self.metrics.swapped,
            on_failed_load=self.metrics.failed_loads.inc,
        )
        self.predictor = Predictor(
            self.open_store,
            residents=self.residents,
            companions=self.companions,
            batcher=self.batcher,
            decoders=self._decoders,
            loaders=self._loaders,
            max_pixels=settings.max_pixels,
            max_queue=settings.max_queue,
            on_answered=self.metrics.answered,
            on_compared=self.metrics.compared,
        )
        self.metrics.watch(
            queue=lambda: self.batcher.depth,
            residents=lambda: self.residents.count,
            model_bytes=lambda: self.residents.bytes,
            following=lambda: self.residents.served is not None and self.error is None,
        )

    def start(self) -> None:
        self.batcher.start()
        self.reloader.start()

    def stop(self) -> None:
        """The reloader first: a load under way still needs the engine to finish."""
        self.reloader.stop()
        self._loaders.shutdown()
        self._decoders.shutdown()
        self.batcher.stop()

    @property
    def error(self) -> str | None:
        """Why the channel's head is not served, in a sentence that may leave this machine."""
        failure = self.reloader.failure
        return tell(failure.error) if failure else None

    def follow(self, moved: ChannelRecord) -> MovedAnswer:
        """Serves what the channel names now that `moved` was appended to it."""
        try:
            self.reloader.follow()
        except Exception as error:
            raise NotServed(
                f"{moved.channel} names version {moved.target} now, "
                f"and this server cannot load it: {tell(error)}"
            ) from error
        served = self.residents.served
        version = served.version if served else moved.target
        return MovedAnswer(version=version, channel=moved.channel, record=moved)
