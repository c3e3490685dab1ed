"""Run batches by torch: the folded form of the network, over experts that all versions share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from weakref import WeakSet

import torch

from dne_serve.engines.base import (
    Answers,
    Fetched,
    Precisions,
    Query,
    ReadShard,
    Resident,
    Steps,
    answer_all,
    read_checked,
    warmed,
)
from dne_serve.engines.gpu import Cuda, Gpu
from dne_serve.engines.torch_bank import BankedVersion, ExpertBank
from dne_serve.engines.torch_device import Cpu, Device
from model_store.network.device import choose_device
from model_store.precision import Asked, try_out
from model_store.records.manifest import Manifest


class TorchEngine:
    backend = "torch"
    workers = 1  # its passes share the memory they compute in

    def __init__(
        self,
        *,
        device: str | Device,
        threads: int | None,
        max_batch: int = 1,
        precision: Asked = "fp32",
        choice: str = "torch",
    ) -> None:
        """Open a device that is given by its name, and set memory aside for `max_batch` images."""
        opened = open_device(device, max_batch=max_batch) if isinstance(device, str) else device
        self._threads = threads
        self.choice = choice
        self._precisions = Precisions(
            precision,
            offered=("bf16",),
            backend=self.backend,
            try_out=partial(try_out, device=opened.place.type),
        )
        self.bank = ExpertBank(device=opened)
        self.device = str(opened.place)
        self._versions: WeakSet[BankedVersion] = WeakSet()

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        matmul_dtype = self._matmul_dtype(manifest)  # here, as a worker must not wait for a trial
        known = self.bank.known(manifest, matmul_dtype=matmul_dtype)
        needed = manifest.model_shards[len(known) :]
        return Fetched(manifest=manifest, shards=read_checked(manifest, needed, read), known=known)

    def load(self, fetched: Fetched) -> Steps[Resident]:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # counts for the calling thread
        version = yield from self.bank.load(
            fetched.manifest,
            known=fetched.known,
            shards=fetched.shards,
            matmul_dtype=self._matmul_dtype(fetched.manifest),
        )
        yield from version.passes.prepare()
        resident = warmed(Resident.of(fetched.manifest, model=version))
        yield from self._renew()  # the bank may have moved what others had prepared for
        self._versions.add(version)
        return resident

    def run(self, widest: Resident, queries: Sequence[Query]) -> Sequence[Answers | Exception]:
        return answer_all(widest, queries)

    def retain(self, residents: Iterable[Resident]) -> Steps[None]:
        yield from self.bank.reclaim()
        yield from self._renew()

    def _matmul_dtype(self, manifest: Manifest) -> torch.dtype | None:
        return torch.bfloat16 if self._precisions.of(manifest) == "bf16" else None

    def _renew(self) -> Steps[None]:
        for found in [weakref.ref(version) for version in self._versions]:
            version = found()  # one at a time: others may leave meanwhile
            if version is not None:
                yield from version.passes.renew()


def open_device(name: str, *, max_batch: int) -> Device:
    """Open a device with memory for batches of `max_batch` images; WrongUsage if it is absent."""
    place = choose_device(name)
    if place.type != "cuda":
        return Cpu(max_batch=max_batch)
    return Gpu(Cuda(place), max_batch=max_batch)
