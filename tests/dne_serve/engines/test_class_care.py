"""Retired and renamed classes as a server shows them, by both backends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dne_serve.engines.base import Engine, finish
from dne_serve.engines.onnx_engine import OnnxEngine
from dne_serve.engines.torch_engine import TorchEngine
from model_store.maintenance.edit_classes import Care, rename_class, retire_class
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.engines.asking import Reads, ask, load, noise
from tests.live_server import Live, png, wait_for

pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")

IMAGES = noise(20)


def care(store: Store) -> Care:
    return Care(store=store, channel="production", actor="tests")


@pytest.mark.parametrize("make", [TorchEngine, OnnxEngine])
def test_the_logits_of_the_other_classes_are_the_same_bits(
    make: Callable[..., Engine], store: Store, digits: Manifest
) -> None:
    child = retire_class("0", care=care(store)).manifest
    engine = make(device="cpu", threads=1)
    before = load(engine, store, digits)
    reads = Reads(store)
    fetched = engine.fetch(child, read=reads)
    assert reads.digests == {child.classifier.sha256}  # no expert is read again
    after = finish(engine.load(fetched))
    assert after.labels == ("a", "b", "1", "2")
    assert after.tasks == ("letters", "letters", "digits", "digits")
    old, new = (ask(engine, one, IMAGES) for one in (before, after))
    assert (old.argmax(axis=1) == 2).any()  # the retired class did win
    assert new.tobytes() == np.ascontiguousarray(old[:, [0, 1, 3, 4]]).tobytes()


@pytest.mark.parametrize("make", [TorchEngine, OnnxEngine])
def test_a_rename_changes_no_logit(
    make: Callable[..., Engine], store: Store, digits: Manifest
) -> None:
    child = rename_class("0", "zero", care=care(store)).manifest
    engine = make(device="cpu", threads=1)
    before, after = (load(engine, store, one) for one in (digits, child))
    assert after.labels == ("a", "b", "zero", "1", "2")
    old, new = (ask(engine, one, IMAGES) for one in (before, after))
    assert new.tobytes() == old.tobytes()


def test_a_live_server_answers_by_the_new_names_and_never_a_retired_one(
    live: Live, store: Store
) -> None:
    sent = [png(i) for i in range(20)]
    before = live.predict(*sent).json()["predictions"]
    gone = before[0]["label"]
    retire_class(gone, care=care(store))
    other = next(one for one in ("a", "b", "0", "1", "2") if one != gone)
    rename_class(other, "<b>renamed<b>", care=care(store))
    wait_for(lambda: live.http.get("/readyz").json()["version"] == 4)
    classes = [one["label"] for one in live.http.get("/classes").json()["classes"]]
    assert len(classes) == 4
    assert "<b>renamed<b>" in classes
    assert {gone, other}.isdisjoint(classes)
    after = live.predict(*sent, query="?top_k=99").json()["predictions"]
    for one in after:
        assert {score["label"] for score in one["top"]} == set(classes)
        assert sum(score["score"] for score in one["top"]) == pytest.approx(1)
    assert live.http.get("/versions/4").json()["retired"] == [gone]
    rows = live.http.get("/versions").json()["versions"]
    assert [row["classes"] for row in rows] == [2, 5, 4, 4]
    assert gone not in rows[-1]["new_classes"]
    # The version before is still there for whoever asks for it.
    again = live.predict(*sent, query="?version=2").json()["predictions"]
    assert [one["label"] for one in again] == [one["label"] for one in before]
