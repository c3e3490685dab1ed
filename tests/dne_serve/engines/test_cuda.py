"""On a real GPU. None of these has been run so far: see docs/adr/027-the-device-seam.md."""

from __future__ import annotations

import numpy as np
import pytest

from dne_serve.engines.torch_engine import ROOM, TorchEngine
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.engines.asking import ask, load, noise
from tests.dne_serve.engines.test_gpu import grow

pytestmark = pytest.mark.gpu


def by(device: str, store: Store, manifest: Manifest, count: int) -> np.ndarray:
    engine = TorchEngine(device=device, threads=1, max_batch=8)
    return ask(engine, load(engine, store, manifest), noise(count))


@pytest.mark.parametrize("count", [1, 3, 8, 9])
def test_a_gpu_gives_the_answers_of_a_processor(store: Store, digits: Manifest, count: int) -> None:
    found, expected = (by(device, store, digits, count) for device in ("cuda", "cpu"))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_batches_of_changing_size_are_not_mixed_up(store: Store, digits: Manifest) -> None:
    engine = TorchEngine(device="cuda", threads=1, max_batch=8)
    resident = load(engine, store, digits)
    expected = ask(engine, resident, noise(8))
    for count in (8, 1, 5, 2, 7, 3, 8):
        found = ask(engine, resident, noise(count))
        np.testing.assert_allclose(found, expected[:count], atol=1e-4 * np.abs(expected).max())


def test_older_versions_answer_the_same_after_the_bank_has_moved(store: Store) -> None:
    lineage = grow(store, 3 + 2 * ROOM)
    engine = TorchEngine(device="cuda", threads=1, max_batch=8)
    older = load(engine, store, lineage[1])
    before = ask(engine, older, noise(5))
    for manifest in lineage[2:]:
        steps = engine.load(engine.fetch(manifest, read=store.read_shard))
        for _ in steps:
            found = ask(engine, older, noise(5))
            np.testing.assert_allclose(found, before, atol=1e-4 * np.abs(before).max())
    np.testing.assert_allclose(
        ask(engine, older, noise(5)), before, atol=1e-4 * np.abs(before).max()
    )
