"""A version as an ONNX file gives the same answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from model_store.class_care import Care, retire_class
from model_store.errors import VersionNotFound, WriteFailed
from model_store.onnx import export_onnx, network_to_onnx
from model_store.spec import NetworkSpec
from model_store.store import Store
from tests.model_store.networks import GEOMETRY, IN_SEQUENCE, grown, images
from tests.model_store.test_codec import version_of


def run(model: bytes, batch: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": batch.numpy()})
    return np.asarray(logits)


@pytest.mark.parametrize(
    ("heads", "geometry"),
    [
        ([2], GEOMETRY),
        ([2, 1, 3], GEOMETRY),
        ([2, 1, 3], IN_SEQUENCE),
        (
            [2, 1],
            NetworkSpec(
                image_size=6, patch_size=2, depth=1, head_width=4, mlp_ratio=3, qkv_bias=False
            ),
        ),
    ],
)
def test_onnx_gives_the_logits_of_torch(heads: list[int], geometry: NetworkSpec) -> None:
    network = grown(heads, geometry=geometry)
    model = network_to_onnx(network, metadata={}).SerializeToString()
    batch = images(5, size=geometry.image_size)
    with torch.no_grad():
        expected = network(batch).numpy()
    assert np.abs(run(model, batch) - expected).max() < 1e-4
    assert (run(model, batch).argmax(1) == expected.argmax(1)).all()


def test_the_batch_size_is_free() -> None:
    network = grown([2, 1])
    model = network_to_onnx(network, metadata={}).SerializeToString()
    batch = images(7)
    one_by_one = np.concatenate([run(model, batch[i : i + 1]) for i in range(7)])
    assert np.abs(run(model, batch) - one_by_one).max() < 1e-5


def test_the_exported_file_says_what_it_is(tmp_path: Path) -> None:
    network = grown([2, 1])
    store = Store.create(str(tmp_path / "models"))
    draft, shards = version_of(network)
    manifest = store.publish(draft, shards=shards)
    path = export_onnx(store, manifest.version, out=tmp_path / "onnx")
    assert path == tmp_path / "onnx" / "version-00000001.onnx"
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    facts = {prop.key: prop.value for prop in model.metadata_props}
    assert facts["version"] == "1"
    assert facts["digest"] == manifest.digest
    assert json.loads(facts["classes"]) == list(network.spec.classes)
    assert json.loads(facts["preprocessing"])["image_size"] == 8
    assert [p.name for p in (tmp_path / "onnx").iterdir()] == [path.name]
    batch = images(2)
    with torch.no_grad():
        assert np.abs(run(path.read_bytes(), batch) - network(batch).numpy()).max() < 1e-4


def test_the_exported_file_leaves_retired_classes_out(tmp_path: Path) -> None:
    network = grown([2, 1])
    store = Store.create(str(tmp_path / "models"))
    draft, shards = version_of(network)
    first = store.publish(draft, shards=shards)
    store.promote(first.version, channel="production", actor="tests", reason="")
    gone = network.spec.classes[1]
    retire_class(gone, care=Care(store=store, channel="production", actor="tests"))
    before, after = (export_onnx(store, version, out=tmp_path) for version in (1, 2))
    model = onnx.load(after)
    onnx.checker.check_model(model, full_check=True)
    facts = {prop.key: prop.value for prop in model.metadata_props}
    kept = [name for name in network.spec.classes if name != gone]
    assert json.loads(facts["classes"]) == kept
    batch = images(3)
    rest = np.delete(run(before.read_bytes(), batch), 1, axis=1)
    assert run(after.read_bytes(), batch).tobytes() == rest.tobytes()


def test_exporting_what_is_not_there_or_to_where_nothing_can_be_written_says_so(
    tmp_path: Path,
) -> None:
    store = Store.create(str(tmp_path / "models"))
    with pytest.raises(VersionNotFound, match="no version 3"):
        export_onnx(store, 3, out=tmp_path)
    draft, shards = version_of(grown([1]))
    store.publish(draft, shards=shards)
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    with pytest.raises(WriteFailed, match="cannot write"):
        export_onnx(store, 1, out=blocked)
