"""A batch of images for many models answers each as its own model would alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dne_serve.engines.base import Answer, Engine, Query, Resident, finish, joined
from dne_serve.engines.batcher import Batcher, Flow
from dne_serve.engines.onnx_engine import OnnxEngine
from dne_serve.engines.torch_engine import TorchEngine
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.tiny_versions import publish_tiny

ENGINES: list[Callable[[], Engine]] = [
    lambda: TorchEngine(device="cpu", threads=1, max_batch=16),
    lambda: OnnxEngine(device="cpu", threads=1),
]
CLASSES = (2, 3, 7)


def load(engine: Engine, store: Store, manifest: Manifest) -> Resident:
    return finish(engine.load(engine.fetch(manifest, read=store.read_shard)))


def models(engine: Engine, folder: Path) -> list[Resident]:
    """Load models of stores of their own: classifiers over one expert, one of them with a younger
    expert beside."""
    made = []
    for number, classes in enumerate(CLASSES):
        store = Store.create(str(folder / f"m{number}"))
        tasks = [("t", [f"c{place}" for place in range(classes)])]
        manifest = publish_tiny(store, tasks=tasks, spread=1.0 + number)
        made.append(load(engine, store, manifest))
    grown = publish_tiny(store, tasks=[("u", ["x", "y"])], parent=manifest, seed=3)
    return [*made, load(engine, store, grown)]


def logits(engine: Engine, widest: Resident, queries: list[Query]) -> list[bytes]:
    answers = engine.run(widest, queries)
    found = [one[0] for one in answers if not isinstance(one, Exception)]
    return [one.logits.tobytes() for one in found if isinstance(one, Answer)]


@pytest.mark.parametrize("make", ENGINES, ids=["torch", "onnx"])
def test_a_mixed_batch_answers_bit_for_bit_as_each_model_alone(
    make: Callable[[], Engine], tmp_path: Path
) -> None:
    engine = make()
    residents = models(engine, tmp_path)
    draw = np.random.default_rng(0)
    for _ in range(10):
        count = int(draw.integers(2, 17))
        images = draw.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
        chosen = [residents[place] for place in draw.integers(0, len(residents), count)]
        widest = chosen[0]
        for one in chosen:
            wider = joined(widest, one)
            assert wider is not None
            widest = wider
        queries = [
            Query(pixels=image, residents=(one,)) for image, one in zip(images, chosen, strict=True)
        ]
        mixed = logits(engine, widest, queries)
        for one in set(chosen):
            same = [Query(pixels=image, residents=(one,)) for image in images]
            alone = logits(engine, one, same)
            for row, own in enumerate(chosen):
                if own is one:
                    np.testing.assert_array_equal(mixed[row], alone[row])


def test_flows_have_turns_and_their_tickets_stay_in_order() -> None:
    batches: list[list[tuple[str, int]]] = []

    def run(key: str, items: object) -> list[None]:
        taken = list(items)  # type: ignore[call-overload]
        batches.append(taken)
        return [None] * len(taken)

    batcher: Batcher[str, tuple[str, int], None] = Batcher(run, max_batch=4, max_queue=64)
    flood: Flow[str, tuple[str, int], None] = Flow()
    others = [Flow[str, tuple[str, int], None]() for _ in range(2)]
    batcher.submit("k", items=[("flood", n) for n in range(8)], flow=flood)
    for number, flow in enumerate(others):
        batcher.submit("k", items=[(f"other {number}", n) for n in range(2)], flow=flow)
    batcher.start()
    while sum(map(len, batches)) < 12:
        pass
    batcher.stop()
    assert batches[0] == [("flood", 0), ("other 0", 0), ("other 1", 0), ("flood", 1)]
    assert batches[1] == [("other 0", 1), ("other 1", 1), ("flood", 2), ("flood", 3)]
    assert [item for batch in batches[2:] for item in batch] == [("flood", n) for n in range(4, 8)]


def test_a_flow_fills_a_part_of_a_batch_while_others_are_in_use() -> None:
    sizes: list[int] = []

    def run(key: str, items: object) -> list[None]:
        sizes.append(len(list(items)))  # type: ignore[call-overload]
        return [None] * sizes[-1]

    batcher: Batcher[str, int, None] = Batcher(run, max_batch=8, max_queue=64)
    flood, other = Flow[str, int, None](burst=2), Flow[str, int, None](burst=2)
    batcher.submit("k", items=list(range(8)), flow=flood)
    batcher.submit("k", items=[0], flow=other)
    batcher.start()
    while sum(sizes) < 9:
        pass
    batcher.stop()
    assert sizes == [3, 2, 2, 2]


def test_a_flow_with_another_network_has_its_turn_too() -> None:
    batches: list[tuple[str, int]] = []

    def run(key: str, items: object) -> list[None]:
        taken = list(items)  # type: ignore[call-overload]
        batches.append((key, len(taken)))
        return [None] * len(taken)

    batcher: Batcher[str, int, None] = Batcher(run, max_batch=4, max_queue=64)
    one, other = Flow[str, int, None](), Flow[str, int, None]()
    batcher.submit("a", items=list(range(12)), flow=one)
    batcher.submit("b", items=[0], flow=other)
    batcher.start()
    while sum(count for _, count in batches) < 13:
        pass
    batcher.stop()
    assert batches[:3] == [("a", 4), ("b", 1), ("a", 4)]
