"""The parts of a running server, put together; started and stopped in the right order."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

from dne_serve.auth import AdminDoor
from dne_serve.batcher import Batcher
from dne_serve.engine import Engine, Floats, Resident
from dne_serve.metrics import Metrics
from dne_serve.predictor import Predictor
from dne_serve.problems import NotServed, tell
from dne_serve.reloader import Reloader
from dne_serve.residents import Limits, Residents
from dne_serve.schemas import MovedAnswer
from dne_serve.settings import Settings
from model_store.channel import ChannelRecord
from model_store.preprocess import Pixels
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
        self.batcher = Batcher[Resident, Pixels, Floats](
            engine.run,
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            on_batch=self.metrics.ran,
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
        self.reloader = Reloader(
            self.open_store,
            residents=self.residents,
            channel=settings.channel,
            poll_s=settings.poll_seconds,
            on_swap=self.metrics.swapped,
            on_failed_load=self.metrics.failed_loads.inc,
        )
        self.predictor = Predictor(
            self.open_store,
            residents=self.residents,
            batcher=self.batcher,
            decoders=self._decoders,
            loaders=self._loaders,
            max_pixels=settings.max_pixels,
            max_queue=settings.max_queue,
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
