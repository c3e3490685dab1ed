"""One batch for several versions: one pass, and every answer that of its own version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dne_serve.engines.base import Engine, Floats, Query, Resident, joined
from dne_serve.engines.onnx_engine import OnnxEngine, OnnxVersion
from dne_serve.engines.torch_engine import BankedVersion, TorchEngine
from dne_serve.errors import ModelUnusable
from model_store.preprocess import Pixels
from model_store.records.manifest import Manifest
from model_store.spec import Readout
from model_store.store.store import Store
from tests.dne_serve.engines.asking import ask, load, noise
from tests.tiny_versions import TINY, publish_tiny


@pytest.fixture(params=["torch", "onnx"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "torch":
        return TorchEngine(device="cpu", threads=1, max_batch=8)
    pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")
    return OnnxEngine(device="cpu", threads=1)


def another(engine: Engine) -> Engine:
    if isinstance(engine, TorchEngine):
        return TorchEngine(device="cpu", threads=1, max_batch=8)
    return OnnxEngine(device="cpu", threads=1)


def publish_next(store: Store, parent: Manifest, name: str, *, spread: float = 1.0) -> Manifest:
    tasks = [(name, [f"{name}-{i}" for i in range(3)])]
    return publish_tiny(store, tasks=tasks, parent=parent, seed=len(name), spread=spread)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The images of every pass over experts."""
    counted: list[int] = []

    def count(version: type[BankedVersion] | type[OnnxVersion]) -> None:
        run = version.run

        def counting(self: Any, pixels: Pixels) -> object:
            counted.append(len(pixels))
            return run(self, pixels)

        monkeypatch.setattr(version, "run", counting)

    count(BankedVersion)
    count(OnnxVersion)
    return counted


def test_versions_of_a_lineage_are_answered_by_one_pass(
    engine: Engine, store: Store, digits: Manifest, letters: Manifest, passes: list[int]
) -> None:
    greek = publish_next(store, digits, "greek")
    residents = [load(engine, store, one) for one in (letters, digits, greek)]
    pixels = noise(9)
    alone = [ask(engine, one, pixels) for one in residents]
    queries = [
        Query(pixels=one, residents=(residents[place % 3],)) for place, one in enumerate(pixels)
    ]
    passes.clear()
    answers = engine.run(residents[2], queries)
    assert passes == [9]
    for place, answer in enumerate(answers):
        assert isinstance(answer, tuple)
        assert answer[0] is not None
        expected = alone[place % 3][place]
        assert answer[0].logits.shape == expected.shape
        np.testing.assert_allclose(answer[0].logits, expected, atol=1e-5 * np.abs(expected).max())


def test_one_image_is_answered_by_several_versions_in_the_order_asked(
    engine: Engine, store: Store, digits: Manifest, letters: Manifest, passes: list[int]
) -> None:
    first, second = (load(engine, store, one) for one in (letters, digits))
    (image,) = noise(1)
    passes.clear()
    (answer,) = engine.run(second, [Query(pixels=image, residents=(first, second, first))])
    assert passes == [1]
    assert isinstance(answer, tuple)
    logits = [one.logits for one in answer if one is not None]
    assert [len(one) for one in logits] == [2, 5, 2]
    np.testing.assert_array_equal(logits[0], logits[2])


def test_versions_that_read_other_blocks_of_one_expert_answer_as_if_alone(
    engine: Engine, store: Store
) -> None:
    narrow = replace(TINY, depth=2, token="in-sequence")
    wide = replace(narrow, readout=Readout(blocks=(1,), grid_block=1, grid=2))
    first, second = (publish_tiny(store, spec=spec) for spec in (narrow, wide))
    assert first.experts == second.experts  # one shard, of which they read more or less
    pixels = noise(4)
    alone = []
    for one in (first, second):
        other = another(engine)
        alone.append(ask(other, load(other, store, one), pixels))
    residents = [load(engine, store, one) for one in (first, second)]
    assert joined(*residents) is None
    for resident, expected in zip(residents, alone, strict=True):
        np.testing.assert_array_equal(ask(engine, resident, pixels), expected)


def test_versions_join_where_one_begins_with_the_experts_of_the_other(
    engine: Engine, store: Store, digits: Manifest, letters: Manifest
) -> None:
    trunk, main, branch = (
        load(engine, store, one) for one in (letters, digits, publish_next(store, letters, "side"))
    )
    assert joined(trunk, main) is main
    assert joined(main, trunk) is main
    assert joined(branch, trunk) is branch
    assert joined(main, branch) is None
    other_pixels = digits.preprocessing.model_copy(update={"mean": (0.1, 0.2, 0.3)})
    odd = Resident.of(digits.model_copy(update={"preprocessing": other_pixels}), model=main.model)
    assert joined(trunk, odd) is None  # its pixels are not theirs


@pytest.mark.parametrize("make", [TorchEngine, OnnxEngine])
def test_a_version_without_finite_logits_fails_its_own_images_only(
    make: Callable[..., Engine], store: Store, digits: Manifest
) -> None:
    if make is OnnxEngine:
        pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")
    engine = make(device="cpu", threads=1)
    sound = load(engine, store, digits)
    broken = Resident.of(digits, model=Overflowing(sound))
    pixels = noise(3)
    queries = [
        Query(pixels=pixels[0], residents=(sound,)),
        Query(pixels=pixels[1], residents=(broken,)),
        Query(pixels=pixels[2], residents=(sound, broken)),
    ]
    own, failed, both = engine.run(sound, queries)
    assert isinstance(own, tuple)
    assert own[0] is not None
    assert isinstance(failed, ModelUnusable)
    assert isinstance(both, tuple)
    assert both[0] is not None
    assert both[1] is None


class Overflowing:
    """A version whose classifier overflows."""

    def __init__(self, sound: Resident) -> None:
        self._sound = sound.model

    def covers(self, other: object) -> bool:
        return False

    def run(self, pixels: Pixels) -> object:
        return self._sound.run(pixels)

    def logits(self, passed: object, rows: Sequence[int]) -> Floats:
        return np.full_like(self._sound.logits(passed, rows), np.inf)

    def log_odds(self, passed: object, rows: Sequence[int]) -> Floats | None:
        return None

    def tokens(self, passed: object, rows: Sequence[int], *, width: int) -> Floats:
        return self._sound.tokens(passed, rows, width=width)
