"""Versions by onnxruntime share what they share. By addresses, sizes and the process's memory."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from dne_serve.engines.base import Query, Resident, finish
from dne_serve.engines.choose import choose_engine
from dne_serve.engines.onnx_engine import OnnxEngine, OnnxVersion
from model_store import precision
from model_store.maintenance.edit_classes import Care, rename_class
from model_store.onnx.weights import Arrays
from model_store.precision import Trial
from model_store.records.manifest import Manifest
from model_store.spec import NetworkSpec
from model_store.store.store import Store
from tests.dne_serve.engines.asking import ask, load, noise
from tests.dne_serve.engines.test_bank import grow
from tests.dne_serve.engines.test_precision import agreeing
from tests.model_store.networks import grown
from tests.model_store.test_codec import version_of

pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")

PRECISIONS = ["fp32", "int8"]


@pytest.fixture(params=PRECISIONS)
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> OnnxEngine:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))
    fast = Trial(runs=True, speedup=2.0)
    monkeypatch.setattr(precision, "try_in_child", lambda command: fast)
    return OnnxEngine(device="cpu", threads=1, precision=request.param)


@pytest.fixture
def lineage(store: Store) -> list[Manifest]:
    """Four versions, each with one task more, that agree in 8 bits."""
    return [agreeing(one, 0.99 + one.version / 1000) for one in grow(store, 4)]


def version_in(resident: Resident) -> OnnxVersion:
    assert isinstance(resident.model, OnnxVersion)
    return resident.model


def given(version: OnnxVersion) -> Arrays:
    """What the session reads, by name."""
    return version.lineage.alone._arrays


def array_bytes(*versions: OnnxVersion) -> int:
    """Of all arrays that sessions of these versions were given, each address once."""
    arrays = [array for one in versions for array in given(one).values()]
    return sum({array.ctypes.data: array.nbytes for array in arrays}.values())


def test_sessions_of_a_lineage_are_given_the_same_arrays(
    engine: OnnxEngine, store: Store, lineage: list[Manifest]
) -> None:
    older, younger = (version_in(load(engine, store, one)) for one in lineage[2:])
    alone = array_bytes(younger)
    assert array_bytes(older, younger) == alone == engine.bank.bytes
    own, others = given(younger), given(older)
    assert len(others) > 50
    assert all(own[name] is array for name, array in others.items())


def test_a_new_version_takes_memory_for_its_expert_and_for_nothing_else(
    engine: OnnxEngine, store: Store, lineage: list[Manifest]
) -> None:
    first = load(engine, store, lineage[2])
    before = engine.bank.bytes
    second = version_in(load(engine, store, lineage[3]))
    assert engine.bank.bytes == before + second.lineage.experts[-1].bytes
    assert engine.bank.experts == 4
    assert len(version_in(first).lineage.experts) == 3


def test_every_session_reads_the_memory_that_they_share(
    engine: OnnxEngine, store: Store, lineage: list[Manifest]
) -> None:
    residents = [load(engine, store, one) for one in lineage[2:]]
    before = [ask(engine, one, noise(3)) for one in residents]
    shared = version_in(residents[0]).lineage.experts[1].arrays["blocks.0.widen.value"]
    kept = shared.copy()
    shared[:] = 0  # nobody does that; if both answers change, both read it here
    for one, logits in zip(residents, before, strict=True):
        assert np.abs(ask(engine, one, noise(3)) - logits).max() > 1e-4
    shared[:] = kept
    for one, logits in zip(residents, before, strict=True):
        np.testing.assert_array_equal(ask(engine, one, noise(3)), logits)


def test_one_pass_answers_for_a_shorter_version_as_its_own_would(
    engine: OnnxEngine, store: Store, lineage: list[Manifest]
) -> None:
    """In 8 bits nearly: the experts of a pass share the scale of what they are multiplied with."""
    older, younger = (load(engine, store, one) for one in lineage[2:])
    alone = ask(engine, older, noise(4))
    answers = engine.run(younger, [Query(pixels=one, residents=(older,)) for one in noise(4)])
    found = np.stack(
        [
            one.logits
            for answer in answers
            if isinstance(answer, tuple)
            for one in answer
            if one is not None
        ]
    )
    eight_bits = any(array.dtype == np.int8 for array in given(version_in(older)).values())
    apart = np.abs(found - alone).max() / np.abs(alone).max()
    assert apart < (0.05 if eight_bits else 1e-5)


def test_arrays_go_with_the_last_version_that_uses_them(
    engine: OnnxEngine, store: Store, lineage: list[Manifest]
) -> None:
    older, younger = load(engine, store, lineage[2]), load(engine, store, lineage[3])
    newest = weakref.ref(version_in(younger).lineage.experts[-1])
    session = weakref.ref(version_in(younger).lineage)
    del younger
    finish(engine.retain([older]))
    assert newest() is None
    assert session() is None
    assert engine.bank.experts == 3
    assert len(ask(engine, older, noise(1))) == 1
    del older
    finish(engine.retain([]))
    assert (engine.bank.experts, engine.bank.bytes) == (0, 0)


def test_branches_share_what_comes_before_the_fork(store: Store) -> None:
    engine, trunk = OnnxEngine(device="cpu", threads=1), grow(store, 3)
    branch = grow(store, 1, on=trunk[1], seed=7)
    main, side = (version_in(load(engine, store, one)) for one in (trunk[2], branch[0]))
    assert main.lineage.experts[:2] == side.lineage.experts[:2]
    assert main.lineage.experts[2] is not side.lineage.experts[2]
    assert not main.covers(side)
    assert not side.covers(main)


def test_versions_that_differ_in_their_names_only_share_the_session(
    store: Store, digits: Manifest
) -> None:
    care = Care(store=store, channel="production", actor="tests")
    child = rename_class("0", "zero", care=care).manifest
    engine = OnnxEngine(device="cpu", threads=1)
    one, other = (version_in(load(engine, store, manifest)) for manifest in (digits, child))
    assert one.lineage is other.lineage
    assert one.covers(other)
    assert other.covers(one)


def test_a_pass_in_eight_bits_does_not_answer_for_a_version_that_needs_more(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))
    fast = Trial(runs=True, speedup=2.0)
    monkeypatch.setattr(precision, "try_in_child", lambda command: fast)
    engine = OnnxEngine(device="cpu", threads=1, precision="auto")
    older, younger = grow(store, 2)
    whole, small = load(engine, store, agreeing(older, 0.5)), load(engine, store, younger)
    assert small.model.covers(whole.model)  # neither agrees, and both are in single precision
    small = load(engine, store, agreeing(younger, 1.0))
    assert not small.model.covers(whole.model)
    assert not whole.model.covers(small.model)


def test_nothing_of_a_version_is_built_on_the_engine_thread(
    store: Store, lineage: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load` is for the engine thread, and only runs what `fetch` has built."""
    engine = OnnxEngine(device="cpu", threads=1)
    fetched = engine.fetch(lineage[1], read=store.read_shard)
    assert engine.bank.experts == 2
    assert not fetched.shards
    monkeypatch.setattr(engine.bank, "load", lambda *args, **named: pytest.fail("built again"))
    found: list[Resident] = []
    thread = threading.Thread(target=lambda: found.append(finish(engine.load(fetched))))
    thread.start()
    thread.join()
    assert found[0].version == lineage[1].version


GROWTH = """
import ctypes, sys
from dne_serve.engines.onnx_engine import OnnxEngine
from model_store.store.store import Store
from tests.dne_serve.engines.asking import ask, load, noise

def used():
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

store, engine = Store.open(sys.argv[1]), OnnxEngine(device="cpu", threads=1)
residents, seen = [], []
for version in (1, 2, 3, 4):
    residents.append(load(engine, store, store.manifest(version)))
    ask(engine, residents[-1], noise(4, size=16))
    seen.append(used())
print(seen[-1] - seen[0], engine.bank.bytes)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="MEMORY NOT MEASURED: no /proc")
def test_three_more_versions_do_not_take_the_memory_of_one(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "models"))
    geometry = NetworkSpec(image_size=16, patch_size=8, depth=2)
    for tasks in (1, 2, 3, 4):
        network = grown([12, 1, 1, 1][:tasks], geometry=geometry, noise=0.01)
        draft, shards = version_of(network)
        store.publish(draft, shards=shards)
    ended = subprocess.run(
        [sys.executable, "-c", GROWTH, store.location], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    growth, held = map(int, ended.stdout.split())
    assert held > 20 << 20
    assert growth < held  # copies would be three times that


def test_packed_weights_give_the_same_answers(store: Store) -> None:
    trunk = grow(store, 3)
    plain = OnnxEngine(device="cpu", threads=1)
    packed = choose_engine("onnx", device="cpu", threads=2, precision="fp32", pack=True)
    pixels = noise(5)
    one, other = (ask(engine, load(engine, store, trunk[-1]), pixels) for engine in (plain, packed))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
