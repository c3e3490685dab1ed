"""Runs batches by torch: the folded form of the network, from experts that all versions share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch

from dne_serve.bank import BankedVersion, ExpertBank
from dne_serve.device import Device, open_device
from dne_serve.engine import (
    Answers,
    Fetched,
    Query,
    ReadShard,
    Resident,
    Steps,
    answer_all,
    read_checked,
    warmed,
)
from model_store.manifest import Manifest


class TorchEngine:
    backend = "torch"

    def __init__(self, *, device: str | Device, threads: int | None, max_batch: int = 1) -> None:
        """`max_batch`: images in a batch at most, for which memory is set aside on a device that
        is given by its name."""
        opened = open_device(device, max_batch=max_batch) if isinstance(device, str) else device
        self._threads = threads
        self.bank = ExpertBank(device=opened)
        self.device = str(opened.place)
        self._versions: WeakSet[BankedVersion] = WeakSet()

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        known = self.bank.known(manifest)
        needed = manifest.model_shards[len(known) :]
        return Fetched(manifest=manifest, shards=read_checked(manifest, needed, read), known=known)

    def load(self, fetched: Fetched) -> Steps[Resident]:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # counts for the calling thread
        version = yield from self.bank.load(
            fetched.manifest, known=fetched.known, shards=fetched.shards
        )
        yield from version.passes.prepare()
        yield
        resident = warmed(Resident.of(fetched.manifest, model=version))
        yield from self._renew()  # the bank may have moved what others had prepared for
        self._versions.add(version)
        return resident

    def run(self, widest: Resident, queries: Sequence[Query]) -> Sequence[Answers | Exception]:
        return answer_all(widest, queries)

    def retain(self, residents: Iterable[Resident]) -> Steps[None]:
        yield from self.bank.reclaim()
        yield from self._renew()

    def _renew(self) -> Steps[None]:
        for found in [weakref.ref(version) for version in self._versions]:
            version = found()  # one at a time: others may leave meanwhile
            if version is not None:
                yield from version.passes.renew()
