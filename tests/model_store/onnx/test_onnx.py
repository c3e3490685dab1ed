"""A version as ONNX files gives the same answers, and shares what versions share."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto

from model_store.errors import VersionNotFound, WriteFailed
from model_store.inference.forward import FoldedNetwork
from model_store.maintenance.edit_classes import Care, retire_class
from model_store.network.network import Network
from model_store.onnx.export import export_onnx
from model_store.onnx.model import (
    FULL,
    SAFE,
    OnnxPrecision,
    Weights,
    in_memory,
    inline,
    largest_here,
    onnx_model,
    quantise,
    weights_of,
)
from model_store.onnx.session import Session
from model_store.precision import try_out
from model_store.spec import NetworkSpec
from model_store.store.store import Store
from tests.model_store.networks import (
    BACKBONES,
    CONVOLVED,
    GATED,
    GEOMETRY,
    IN_SEQUENCE,
    LARGE_CONVOLVED,
    grown,
    images,
    task,
)
from tests.model_store.test_codec import version_of


def run(model: bytes | Path, batch: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": batch.numpy()})
    return np.asarray(logits)


def whole_model(network: Network) -> bytes:
    """Build a model that includes its weights, as any runtime reads it."""
    weights = weights_of(network)
    model = onnx_model(weights, files=in_memory(weights), metadata={})
    inline(model, weights.named())
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def expected_of(network: Network, batch: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(network(batch))


def publish_grown(store: Store, network: Network) -> int:
    draft, shards = version_of(network)
    return store.publish(draft, shards=shards).version


def onnx_data(path: Path) -> set[str]:
    """List the data files of a graph."""
    model = onnx.load(path, load_external_data=False)
    pairs = (entry for one in model.graph.initializer for entry in one.external_data)
    return {entry.value for entry in pairs if entry.key == "location"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def resident_bytes() -> int:
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("MEMORY NOT MEASURED: there is no /proc")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


SPECS = [
    ([2], GEOMETRY),
    ([2, 1, 3], GEOMETRY),
    ([2, 1, 1, 1], GEOMETRY),
    ([3, 2, 2, 1, 1, 2], GEOMETRY),
    ([2, 1, 3], IN_SEQUENCE),
    ([4, 1, 1, 2], GATED),
    ([4, 1, 1, 2], CONVOLVED),
    ([2, 1, 1], LARGE_CONVOLVED),
    ([2, 0, 1, 0, 0], IN_SEQUENCE),
    *(([2, 1, 1, 2], geometry) for geometry in BACKBONES),
    *(([2], geometry) for geometry in BACKBONES),
    (
        [2, 1],
        NetworkSpec(image_size=6, patch_size=2, depth=1, head_width=4, mlp_ratio=3, qkv_bias=False),
    ),
]


@pytest.mark.parametrize(("heads", "geometry"), SPECS)
def test_onnx_gives_the_logits_of_torch(heads: list[int], geometry: NetworkSpec) -> None:
    network = grown(heads, geometry=geometry, noise=0.1)
    model = whole_model(network)
    batch = images(5, size=geometry.image_size)
    expected = expected_of(network, batch)
    assert np.abs(run(model, batch) - expected).max() < 1e-4
    assert (run(model, batch).argmax(1) == expected.argmax(1)).all()


def test_an_expert_may_cut_its_own_attention_as_it_likes() -> None:
    torch.manual_seed(0)
    network = Network(GEOMETRY)
    for index, (heads, attention_heads) in enumerate([(2, 4), (2, 1), (2, 2), (2, 2)]):
        network.expand(task(f"task{index}", heads=heads, attention_heads=attention_heads))
    network.eval()
    model = whole_model(network)
    assert np.abs(run(model, images(3)) - expected_of(network, images(3))).max() < 1e-4


def test_an_exported_version_says_what_it_is(tmp_path: Path) -> None:
    network = grown([2, 1])
    store = Store.create(str(tmp_path / "models"))
    draft, shards = version_of(network)
    manifest = store.publish(draft, shards=shards)
    exported = export_onnx(store, manifest.version, out=tmp_path / "onnx")
    assert exported.path == tmp_path / "onnx" / "version-00000001.onnx"
    onnx.checker.check_model(exported.path, full_check=True)
    model = onnx.load(exported.path, load_external_data=False)
    facts = {prop.key: prop.value for prop in model.metadata_props}
    assert facts["version"] == "1"
    assert facts["digest"] == manifest.digest
    assert json.loads(facts["classes"]) == list(network.spec.classes)
    assert json.loads(facts["preprocessing"])["image_size"] == 8
    assert sum(path.stat().st_size for path in (tmp_path / "onnx").iterdir()) == (
        exported.total_bytes
    )
    assert len(names(tmp_path / "onnx")) == 4  # the graph, two experts, the classifier
    assert np.abs(run(exported.path, images(2)) - expected_of(network, images(2))).max() < 1e-4


def test_exporting_the_next_version_writes_its_expert_its_classifier_and_its_graph(
    tmp_path: Path,
) -> None:
    store, out = Store.create(str(tmp_path / "models")), tmp_path / "onnx"
    network = grown([2, 1, 1])
    first = export_onnx(store, publish_grown(store, network), out=out)
    before = names(out)
    network.expand(task("another", heads=1))
    network.eval()
    second = export_onnx(store, publish_grown(store, network), out=out)
    new = names(out) - before
    older = onnx_data(second.path) - new
    assert len(new) == 3
    assert second.written_bytes == sum((out / name).stat().st_size for name in new)
    assert second.total_bytes - second.written_bytes == sum(
        (out / name).stat().st_size for name in older
    )
    assert np.abs(run(second.path, images(2)) - expected_of(network, images(2))).max() < 1e-4

    again = export_onnx(store, 1, out=out)
    assert again.written_bytes == first.path.stat().st_size


def test_a_file_that_was_damaged_in_the_folder_is_written_anew(tmp_path: Path) -> None:
    store, out = Store.create(str(tmp_path / "models")), tmp_path / "onnx"
    network = grown([2, 1])
    exported = export_onnx(store, publish_grown(store, network), out=out)
    largest = max(out.glob("*.bin"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-64] + bytes(range(64)))
    again = export_onnx(store, 1, out=out)
    assert again.written_bytes == largest.stat().st_size + exported.path.stat().st_size
    assert np.abs(run(again.path, images(2)) - expected_of(network, images(2))).max() < 1e-4


def test_an_exported_version_leaves_retired_classes_out(tmp_path: Path) -> None:
    network = grown([2, 1])
    store = Store.create(str(tmp_path / "models"))
    first = publish_grown(store, network)
    store.promote(first, channel="production", actor="tests", reason="")
    gone = network.spec.classes[1]
    retire_class(gone, care=Care(store=store, channel="production", actor="tests"))
    before, after = (export_onnx(store, version, out=tmp_path).path for version in (1, 2))
    onnx.checker.check_model(after, full_check=True)
    model = onnx.load(after, load_external_data=False)
    facts = {prop.key: prop.value for prop in model.metadata_props}
    kept = [name for name in network.spec.classes if name != gone]
    assert json.loads(facts["classes"]) == kept
    rest = np.delete(run(before, images(3)), 1, axis=1)
    assert run(after, images(3)).tobytes() == rest.tobytes()


def test_exporting_what_is_not_there_or_to_where_nothing_can_be_written_says_so(
    tmp_path: Path,
) -> None:
    store = Store.create(str(tmp_path / "models"))
    with pytest.raises(VersionNotFound, match="no version 3"):
        export_onnx(store, 3, out=tmp_path)
    publish_grown(store, grown([1]))
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    with pytest.raises(WriteFailed, match="cannot write"):
        export_onnx(store, 1, out=blocked)


def test_an_expert_has_the_same_arrays_in_every_version() -> None:
    network = grown([2, 1, 1])
    older = weights_of(network)
    network.expand(task("another", heads=1))
    younger = weights_of(network)
    for part in ("experts.0", "experts.1", "experts.2"):
        assert older.parts[part].keys() == younger.parts[part].keys()
        for name, array in older.parts[part].items():
            np.testing.assert_array_equal(array, younger.parts[part][name])


@pytest.mark.parametrize(("heads", "geometry"), SPECS)
def test_a_session_gives_the_logits_of_torch(heads: list[int], geometry: NetworkSpec) -> None:
    network = grown(heads, geometry=geometry, noise=0.1)
    batch = images(3, size=geometry.image_size)
    session = Session(weights_of(network), threads=1)
    assert np.abs(session(batch.numpy()) - expected_of(network, batch)).max() < 1e-4


@pytest.mark.parametrize(("heads", "geometry"), SPECS)
def test_a_session_of_a_lineage_gives_the_token_that_classifiers_read(
    heads: list[int], geometry: NetworkSpec
) -> None:
    network = grown(heads, geometry=geometry, noise=0.1)
    whole = weights_of(network)
    experts = {part: arrays for part, arrays in whole.parts.items() if part != "heads"}
    batch = images(3, size=geometry.image_size)
    token = Session(Weights(spec=whole.spec, parts=experts), threads=1)(batch.numpy())
    assert token.shape == (3, whole.spec.token_width)
    logits = token @ whole.parts["heads"]["weight"] + whole.parts["heads"]["bias"]
    assert np.abs(logits - expected_of(network, batch)).max() < 1e-4


@pytest.mark.filterwarnings("ignore:Specified provider:UserWarning")
def test_a_session_for_a_gpu_holds_its_weights_itself() -> None:
    """Without a GPU the runtime takes the processor, after saying so."""
    network = grown([2, 1, 1], noise=0.1)
    weights = weights_of(network)
    session = Session(weights, threads=1, device="cuda")
    batch = images(3)
    assert np.abs(session(batch.numpy()) - expected_of(network, batch)).max() < 1e-4
    weights.parts["experts.0"]["blocks.0.widen.weight"][:] = 0
    assert np.abs(session(batch.numpy()) - expected_of(network, batch)).max() < 1e-4


def test_a_second_session_takes_no_memory_of_its_own_for_its_passes() -> None:
    network = grown([4, 1], geometry=NetworkSpec(image_size=32, patch_size=4, depth=1))
    sessions = [Session(weights_of(network), threads=1) for _ in range(4)]
    batch = images(32, size=32).numpy()
    sessions[0](batch)
    before = resident_bytes()
    for session in sessions[1:]:
        session(batch)
    # What one pass needs is several times as much.
    assert resident_bytes() - before < 4 * batch.nbytes


def test_a_session_leaves_the_processor_alone_between_two_passes() -> None:
    """By the processor time of the whole process while no pass is under way."""
    network = grown([4], geometry=NetworkSpec(image_size=32, patch_size=4, depth=1))
    session, batch = Session(weights_of(network), threads=2), images(4, size=32).numpy()
    session(batch)
    idle_s = []
    for _ in range(5):
        session(batch)
        began_s = time.process_time()
        time.sleep(0.02)
        idle_s.append(time.process_time() - began_s)
    assert min(idle_s) < 0.001


def test_sessions_of_several_versions_read_the_same_memory() -> None:
    network = grown([2, 1, 1])
    older = weights_of(network)
    network.expand(task("another", heads=1))
    network.eval()
    younger = weights_of(network)
    shared = {part: older.parts[part] for part in older.parts if part != "heads"}
    younger = Weights(spec=younger.spec, parts={**younger.parts, **shared})
    sessions = [Session(one, threads=1) for one in (older, younger)]
    batch = images(2).numpy()
    before = [session(batch) for session in sessions]
    for part, name in (
        ("experts.0", "blocks.0.widen.weight"),
        ("experts.2", "blocks.0.widen.value"),
        ("experts.1", "blocks.last.narrow.before"),
    ):
        kept = shared[part][name].copy()
        shared[part][name][:] = 0  # nobody does that; if both answers change, both read it here
        assert all(
            np.abs(session(batch) - logits).max() > 1e-3
            for session, logits in zip(sessions, before, strict=True)
        )
        shared[part][name][:] = kept
    for session, logits in zip(sessions, before, strict=True):
        np.testing.assert_array_equal(session(batch), logits)


@pytest.mark.parametrize(("heads", "geometry"), SPECS)
def test_eight_bits_give_nearly_the_logits_of_torch(
    heads: list[int], geometry: NetworkSpec
) -> None:
    network = grown(heads, geometry=geometry, noise=0.1)
    batch = images(16, size=geometry.image_size)
    expected = expected_of(network, batch)
    session = Session(weights_of(network, precision="int8"), threads=1)
    found = session(batch.numpy())
    apart = np.abs(found - expected).max()
    assert 1e-5 < apart < 0.1 * np.abs(expected).max()


MANY_POSITIONS = replace(GEOMETRY, image_size=24, patch_size=2)
Forward = Callable[[np.ndarray], np.ndarray]


def in_precision(network: Network, name: str) -> Forward:
    if name == "bf16":
        folded = FoldedNetwork.of(network, matmul_dtype=torch.bfloat16)
        return lambda batch: folded(torch.from_numpy(batch)).numpy()
    precision: OnnxPrecision = "fp32" if name == "fp32" else "int8"
    return Session(weights_of(network, precision=precision), threads=1)


@pytest.mark.parametrize("precision", ["fp32", "int8", "bf16"])
@pytest.mark.parametrize(
    ("heads", "geometry"), [*SPECS, ([2, 1, 1, 2], MANY_POSITIONS), ([2], MANY_POSITIONS)]
)
def test_an_answer_does_not_depend_on_its_batch(
    heads: list[int], geometry: NetworkSpec, precision: str
) -> None:
    if precision == "bf16" and not try_out("bf16").runs:
        pytest.skip("16 BITS NOT TRIED: they do not run here")
    run_batch = in_precision(grown(heads, geometry=geometry, noise=0.1), precision)
    batch = images(5, size=geometry.image_size).numpy()
    batch[2] *= 100  # its values must not widen the steps of the others
    with torch.inference_mode():
        together = run_batch(batch)
        for row in range(len(batch)):
            alone = run_batch(batch[row : row + 1])
            apart = np.abs(together[row] - alone).max()
            # Sums in another order may round a value up instead of down: never by much.
            assert apart < (1e-4 if precision == "fp32" else 5e-3) * np.abs(alone).max()


def test_exported_eight_bits_are_standard_nodes_and_give_the_same_answers(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "models"))
    for heads, geometry in (([2, 1], GEOMETRY), ([2, 1], MANY_POSITIONS)):
        network = grown(heads, geometry=geometry, noise=0.1)
        version = publish_grown(store, network)
        exported = export_onnx(store, version, out=tmp_path / "onnx", precision="int8")
        model = onnx.load(exported.path)
        assert {node.domain for node in model.graph.node} == {""}
        batch = images(1, size=geometry.image_size)
        session = Session(weights_of(network, precision="int8"), threads=1)
        assert np.abs(run(exported.path, batch) - session(batch.numpy())).max() < 1e-4


def test_weights_in_eight_bits_are_as_large_as_this_processor_adds_exactly() -> None:
    """A largest weight by the largest row, in a product of any size."""
    largest = largest_here()
    assert largest in (SAFE, FULL)
    numbers = np.random.default_rng(0)
    rows = numbers.integers(200, 256, (33, 200), dtype=np.uint8)
    weight = np.full((200, 70), largest, dtype=np.int8)
    node = onnx.helper.make_node("MatMulInteger", ["rows", "weight"], ["sums"])
    tensors = [
        onnx.helper.make_tensor_value_info(name, kind, None)
        for name, kind in (("rows", TensorProto.UINT8), ("sums", TensorProto.INT32))
    ]
    held = [onnx.numpy_helper.from_array(weight, "weight")]
    graph = onnx.helper.make_graph([node], "sums", tensors[:1], tensors[1:], held)
    opsets = [onnx.helper.make_opsetid("", 20)]
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=opsets)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (sums,) = session.run(None, {"rows": rows})
    np.testing.assert_array_equal(sums, rows.astype(np.int64) @ weight.astype(np.int64))


def test_larger_weights_in_eight_bits_lose_less() -> None:
    weight = np.random.default_rng(0).normal(size=(384, 64)).astype(np.float32)

    def lost(largest: int) -> float:
        whole, scale = quantise(weight, largest=largest)
        return float(np.abs(whole * scale - weight).mean())

    assert lost(FULL) < 0.6 * lost(SAFE)


def test_an_expert_in_eight_bits_is_much_smaller_and_shared_as_well(tmp_path: Path) -> None:
    store, out = Store.create(str(tmp_path / "models")), tmp_path / "onnx"
    network = grown([4, 2, 2], geometry=NetworkSpec(image_size=8, patch_size=4, depth=2))
    version = publish_grown(store, network)
    whole = export_onnx(store, version, out=out)
    small = export_onnx(store, version, out=out, precision="int8")
    assert small.path == out / "version-00000001.int8.onnx"
    sizes = [
        sum((out / name).stat().st_size for name in onnx_data(one.path)) for one in (whole, small)
    ]
    assert sizes[1] < 0.5 * sizes[0]
    network.expand(task("another", heads=2))
    network.eval()
    before = names(out)
    younger = export_onnx(store, publish_grown(store, network), out=out, precision="int8")
    assert len(names(out) - before) == 3
    onnx.checker.check_model(younger.path, full_check=True)
    model = onnx.load(younger.path, load_external_data=False)
    assert {"key": "precision", "value": "int8"} in [
        {"key": prop.key, "value": prop.value} for prop in model.metadata_props
    ]


def test_quantised_weights_leave_room_for_two_products_in_sixteen_bits() -> None:
    weight = np.random.default_rng(0).standard_normal((3, 16, 5)).astype(np.float32)
    weight[:, :, 2] = 0
    rounded, scale = quantise(weight)
    assert 2 * 255 * int(np.abs(rounded).max()) < 1 << 15
    assert np.abs(rounded * scale - weight).max() <= scale.max() / 2 + 1e-6
    assert scale[0] != scale[1]  # a column has its own
