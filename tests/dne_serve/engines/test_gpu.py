"""The paths of a GPU, on one that only pretends. What it cannot show is in `test_cuda.py`."""

from __future__ import annotations

import logging
import weakref

import numpy as np
import pytest
import torch

from dne_serve.engines import torch_engine
from dne_serve.engines.base import Resident, finish
from dne_serve.engines.torch_device import Cpu, Device, Gpu, GraphedPasses, Normalising, graph_sizes
from dne_serve.engines.torch_engine import MOST_ROOM, ROOM, BankedVersion, TorchEngine
from dne_serve.errors import ModelUnusable
from model_store.precision import Trial
from model_store.preprocess import normalise
from model_store.records.manifest import Manifest, Preprocessing
from model_store.store.store import Store
from tests.dne_serve.engines.asking import ask, load, noise
from tests.dne_serve.engines.fake_gpu import FakeDriver, FakeGraph, FreedMemory
from tests.tiny_versions import publish_tiny

MAX_BATCH = 4
SIZES = [4, 2, 1]


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def engine(driver: FakeDriver) -> TorchEngine:
    return TorchEngine(device=Gpu(driver, max_batch=MAX_BATCH), threads=1)


def grow(
    store: Store, count: int, *, on: Manifest | None = None, name: str = "t"
) -> list[Manifest]:
    made: list[Manifest] = []
    for number in range(count):
        parent = made[-1] if made else on
        tasks = [(f"{name}{number}", [f"{name}{number}-{i}" for i in range(2)])]
        made.append(publish_tiny(store, tasks=tasks, parent=parent, seed=number))
    return made


def by_cpu(store: Store, manifest: Manifest, count: int) -> np.ndarray:
    engine = TorchEngine(device="cpu", threads=1, max_batch=count)
    return ask(engine, load(engine, store, manifest), noise(count))


def graphs_of(resident: Resident) -> list[FakeGraph]:
    assert isinstance(resident.model, BankedVersion)
    assert isinstance(resident.model.passes, GraphedPasses)
    graphs = [one.graph for one in resident.model.passes._captured.values()]
    return [one for one in graphs if isinstance(one, FakeGraph)]


def test_usual_sizes_are_powers_of_two_and_the_largest_batch() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(2) == (1, 2)
    assert graph_sizes(12) == (1, 2, 4, 8, 12)
    assert graph_sizes(16) == (1, 2, 4, 8, 16)


def test_bytes_are_normalised_to_the_same_bits_as_elsewhere() -> None:
    odd = Preprocessing(image_size=16, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    pixels = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    found = Normalising(odd, place=torch.device("cpu"))(torch.from_numpy(pixels))
    assert found.is_contiguous()
    assert np.array_equal(found.numpy(), normalise(pixels, odd))


def test_a_batch_replays_the_graph_of_the_next_size_and_larger_ones_none(
    engine: TorchEngine, driver: FakeDriver, store: Store, digits: Manifest
) -> None:
    resident = load(engine, store, digits)
    assert driver.captured == SIZES
    for count, size in [(4, 4), (3, 4), (1, 1), (2, 2), (5, None), (3, 4)]:
        driver.replayed.clear()
        found = ask(engine, resident, noise(count))
        assert driver.replayed == ([] if size is None else [size])
        np.testing.assert_allclose(found, by_cpu(store, digits, count), atol=1e-5)
    assert driver.captured == SIZES


def test_what_is_in_the_padding_changes_nothing(
    engine: TorchEngine, store: Store, digits: Manifest
) -> None:
    resident = load(engine, store, digits)
    wanted = noise(3)
    before = ask(engine, resident, wanted)
    ask(engine, resident, [np.full_like(one, 255) for one in noise(4)])
    assert np.array_equal(ask(engine, resident, wanted), before)


def test_versions_share_a_pass_from_a_graph(
    engine: TorchEngine, driver: FakeDriver, store: Store, letters: Manifest, digits: Manifest
) -> None:
    older, newer = load(engine, store, letters), load(engine, store, digits)
    passed = newer.model.run(np.stack(noise(3)))
    assert len(passed) == 3  # without the padding
    driver.replayed.clear()
    found = older.model.logits(passed, [0, 2])
    assert driver.replayed == []
    np.testing.assert_allclose(found, by_cpu(store, letters, 3)[[0, 2]], atol=1e-5)


def test_a_graph_from_before_the_bank_moved_would_read_freed_memory(
    engine: TorchEngine, store: Store
) -> None:
    """That the fake can tell, so that the tests below can fail."""
    lineage = grow(store, 2 + ROOM + 2)
    resident = load(engine, store, lineage[1])
    outdated = graphs_of(resident)
    assert not any(graph.points_into_freed_memory for graph in outdated)
    load(engine, store, lineage[-1])
    assert all(graph.points_into_freed_memory for graph in outdated)
    with pytest.raises(FreedMemory):
        outdated[0].replay()


@pytest.mark.long
def test_while_the_bank_grows_older_versions_answer_and_never_from_freed_memory(
    engine: TorchEngine, driver: FakeDriver, store: Store
) -> None:
    lineage = grow(store, 8)
    older = resident = load(engine, store, lineage[2])
    expected = by_cpu(store, lineage[2], 3)
    without_a_graph = 0
    for manifest in lineage[3:]:
        steps = engine.load(engine.fetch(manifest, read=store.read_shard))
        while True:
            driver.replayed.clear()
            np.testing.assert_allclose(ask(engine, older, noise(3)), expected, atol=1e-5)
            without_a_graph += not driver.replayed
            try:
                next(steps)
            except StopIteration as end:
                resident = end.value
                break
    assert without_a_graph > 0  # it has moved, and that was noticed
    for one in (older, resident):
        assert sorted(graph.images for graph in graphs_of(one)) == sorted(SIZES)  # renewed
        driver.replayed.clear()
        ask(engine, one, noise(3))
        assert driver.replayed == [4]


def test_a_version_for_which_there_was_room_costs_others_no_graph(
    engine: TorchEngine, driver: FakeDriver, store: Store
) -> None:
    lineage = grow(store, 4)
    older = load(engine, store, lineage[2])  # the second of a stack makes room for more
    before = graphs_of(older)
    driver.captured.clear()
    load(engine, store, lineage[3])
    assert driver.captured == SIZES
    assert graphs_of(older) == before


def test_memory_that_is_given_back_is_a_move_too(
    engine: TorchEngine, driver: FakeDriver, store: Store
) -> None:
    lineage = grow(store, 4 + MOST_ROOM)
    short, long = load(engine, store, lineage[1]), load(engine, store, lineage[-1])
    outdated = graphs_of(short)
    del long
    for _ in engine.retain([short]):
        ask(engine, short, noise(3))
    assert all(graph.points_into_freed_memory for graph in outdated)
    driver.replayed.clear()
    np.testing.assert_allclose(
        ask(engine, short, noise(3)), by_cpu(store, lineage[1], 3), atol=1e-5
    )
    assert driver.replayed == [4]


@pytest.mark.long
def test_whatever_the_bank_does_a_graph_that_is_in_date_points_into_living_memory(
    engine: TorchEngine, driver: FakeDriver, store: Store
) -> None:
    """The rule itself, at every step: addresses change only where `moves` does."""
    trunk = grow(store, 6)
    branch = grow(store, 5, on=trunk[2], name="b")
    wide = publish_tiny(store, tasks=[("w", ["w-0"])], parent=trunk[4], heads=2)
    residents = [load(engine, store, trunk[1])]

    def check() -> None:
        for one in residents:
            assert isinstance(one.model, BankedVersion)
            lineage = one.model.network.lineage
            assert isinstance(one.model.passes, GraphedPasses)
            for captured in one.model.passes._captured.values():
                assert isinstance(captured.graph, FakeGraph)
                if captured.relocations == lineage.relocations:
                    assert not captured.graph.points_into_freed_memory
            list(one.model.passes.renew())  # so that there is a graph from every step

    for manifest in (trunk[5], branch[4], wide, trunk[3]):
        steps = engine.load(engine.fetch(manifest, read=store.read_shard))
        while True:
            check()
            try:
                next(steps)
            except StopIteration as end:
                residents.append(end.value)
                break
    while len(residents) > 1:
        residents.pop(1)
        for _ in engine.retain(residents):
            check()
        check()


def test_graphs_go_with_their_version_and_keep_no_expert(
    engine: TorchEngine, driver: FakeDriver, store: Store
) -> None:
    short, long = (load(engine, store, one) for one in grow(store, 2))
    assert isinstance(long.model, BankedVersion)
    stack = weakref.ref(long.model.experts[-1].stack)
    assert len(driver.graphs) == 2 * len(SIZES)
    del long
    finish(engine.retain([short]))
    assert len(driver.graphs) == len(SIZES)
    assert stack() is None


def test_a_version_that_cannot_be_recorded_is_served_without_graphs(
    engine: TorchEngine,
    driver: FakeDriver,
    store: Store,
    digits: Manifest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver.full = True
    with caplog.at_level(logging.WARNING, "dne_serve"):
        resident = load(engine, store, digits)
    assert "run without a graph: no memory left" in caplog.text
    np.testing.assert_allclose(ask(engine, resident, noise(3)), by_cpu(store, digits, 3), atol=1e-5)
    assert driver.replayed == []


def test_16_bits_are_recorded_as_they_are_computed(
    driver: FakeDriver, store: Store, digits: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Trial(runs=True, speedup=2.0)
    monkeypatch.setattr(torch_engine, "try_out", lambda name, *, device: fast)
    metrics = digits.metrics.model_copy(update={"agreement": {"bf16": 1.0}})
    agreeing = digits.model_copy(update={"metrics": metrics})
    devices: list[Device] = [Gpu(driver, max_batch=MAX_BATCH), Cpu(max_batch=MAX_BATCH)]
    found, expected = (
        ask(engine, load(engine, store, agreeing), noise(4))
        for engine in (TorchEngine(device=one, threads=1, precision="bf16") for one in devices)
    )
    assert 4 in driver.replayed
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, by_cpu(store, digits, 4))


def test_a_recorded_pass_that_is_not_finite_is_refused(engine: TorchEngine, store: Store) -> None:
    with pytest.raises(ModelUnusable, match="version 1"):
        load(engine, store, publish_tiny(store, spread=1e38))
