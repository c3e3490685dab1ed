"""Runs batches by torch: the folded form of the network, from experts that all versions share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dne_serve.bank import ExpertBank
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
from model_store.network import choose_device


class TorchEngine:
    backend = "torch"

    def __init__(self, *, device: str, threads: int | None, max_batch: int = 1) -> None:
        """`max_batch`: images in a batch at most, for which memory is set aside."""
        self._device = choose_device(device)
        self._threads = threads
        self._max_batch = max_batch
        self.bank = ExpertBank(device=self._device)
        self.device = str(self._device)

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
        version.network.lineage.reserve(self._max_batch)
        yield
        return warmed(Resident.of(fetched.manifest, model=version))

    def run(self, widest: Resident, queries: Sequence[Query]) -> Sequence[Answers | Exception]:
        return answer_all(widest, queries)

    def retain(self, residents: Iterable[Resident]) -> Steps[None]:
        yield from self.bank.reclaim()
