from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from model_store.errors import RecordInvalid
from model_store.records.describe import change, verdict
from model_store.records.manifest import (
    Geometry,
    Manifest,
    Metrics,
    TaskRecord,
    decode,
    delta_of,
    encode,
    geometry_of,
    total_bytes,
)
from model_store.records.quality import Gate
from model_store.records.sealing import seal
from model_store.spec import Backbone, ExpertSpec
from tests.model_store.drafts import expert_refs, prepare

HEADS = prepare().draft.tasks[0].heads


def _manifest(version: int = 1, **asked: Any) -> Manifest:
    return decode("x", encode(prepare(**asked).draft, version=version), version=version)


def _body() -> dict[str, Any]:
    body: dict[str, Any] = json.loads(encode(prepare().draft, version=3))
    del body["digest"]
    return body


def test_a_draft_survives_its_bytes() -> None:
    draft = prepare().draft
    manifest = decode("x", encode(draft, version=3), version=3)
    assert manifest.model_dump(exclude={"version", "digest", "signature"}) == draft.model_dump()
    assert manifest.version == 3


def test_every_member_is_written_whatever_its_value() -> None:
    """But for members of which older manifests knew nothing."""
    written = json.loads(encode(prepare().draft, version=3))
    left_out = {"adapted", "corrected", "deepened", "doubt", "hierarchy", "statistics"}
    assert written.keys() == Manifest.model_fields.keys() - left_out
    assert written["metrics"].keys() == Metrics.model_fields.keys() - {"scores", "shown", "run"}
    assert written["network"].keys() == Geometry.model_fields.keys() - {
        *("attention", "backbone", "readout", "stem")
    }
    assert written["tasks"][0].keys() == TaskRecord.model_fields.keys()


@pytest.mark.parametrize(
    "path",
    ["retired", "signature", "network.token", "tasks.0.attention_heads", "metrics.agreement"],
)
def test_a_manifest_that_lacks_a_member_is_refused(path: str) -> None:
    body = json.loads(encode(prepare().draft, version=3))
    del body["digest"]
    place, last = _place(body, path)
    del place[last]
    with pytest.raises(RecordInvalid):
        decode("x", seal(body), version=3)


def test_counts_of_scores_are_written_where_there_are_some_and_have_a_count_a_bin() -> None:
    body = _body()
    body["metrics"]["scores"] = counts = list(range(12))
    manifest = decode("x", seal(body), version=3)
    assert manifest.metrics.scores == tuple(counts)
    for wrong in (counts[:-1], [*counts, 1], [-1, *counts[1:]], None):
        body["metrics"]["scores"] = wrong
        with pytest.raises(RecordInvalid):
            decode("x", seal(body), version=3)


def test_attention_is_written_where_it_is_gated_and_nowhere_else() -> None:
    draft = prepare().draft
    gated = draft.model_copy(
        update={"network": draft.network.model_copy(update={"attention": "gated"})}
    )
    sealed = encode(gated, version=3)
    assert json.loads(sealed)["network"]["attention"] == "gated"
    assert decode("x", sealed, version=3).spec.attention == "gated"
    body = json.loads(encode(draft, version=3))
    del body["digest"]
    body["network"]["attention"] = "plain"
    with pytest.raises(RecordInvalid, match="spelt in another way"):
        decode("x", seal(body), version=3)


def test_a_stem_is_written_where_it_is_of_convolutions_and_nowhere_else() -> None:
    draft = prepare().draft
    convolved = draft.model_copy(
        update={"network": draft.network.model_copy(update={"stem": "convolutions"})}
    )
    sealed = encode(convolved, version=3)
    assert json.loads(sealed)["network"]["stem"] == "convolutions"
    assert decode("x", sealed, version=3).spec.stem == "convolutions"
    body = json.loads(encode(draft, version=3))
    del body["digest"]
    for stem, sentence in (("patches", "spelt in another way"), ("tubes", "stem")):
        body["network"]["stem"] = stem
        with pytest.raises(RecordInvalid, match=sentence):
            decode("x", seal(body), version=3)


def test_a_backbone_is_written_where_there_is_one_and_nowhere_else() -> None:
    draft = prepare().draft
    described = replace(draft.spec, token="in-sequence", backbone=Backbone(registers=4))
    network = draft.model_copy(update={"network": geometry_of(described)})
    sealed = encode(network, version=3)
    assert json.loads(sealed)["network"]["backbone"] == {
        "registers": 4,
        "rotary": False,
        "activation": "gelu",
        "pre_norm": False,
        "qk_norm": False,
        "hidden_norm": 0,
        "pooling": "token",
    }
    assert decode("x", sealed, version=3).spec.backbone == Backbone(registers=4)
    for wrong in (None, {}, {"registers": 4}, {**asdict(Backbone(registers=4)), "more": 1}):
        body = json.loads(encode(draft, version=3))
        del body["digest"]
        body["network"]["backbone"] = wrong
        with pytest.raises(RecordInvalid):
            decode("x", seal(body), version=3)


def test_token_and_attention_heads_are_those_of_the_spec() -> None:
    draft = prepare().draft
    body = _body()
    body["network"]["token"] = "in-sequence"
    body["tasks"][0]["attention_heads"] = 2 * HEADS
    manifest = decode("x", seal(body), version=3)
    assert manifest.spec == replace(
        draft.spec,
        token="in-sequence",
        tasks=(
            replace(draft.spec.tasks[0], expert=ExpertSpec(heads=HEADS, attention_heads=2 * HEADS)),
        ),
    )
    assert encode(manifest, version=3) == seal(body)


def test_a_manifest_under_another_number_is_refused() -> None:
    with pytest.raises(RecordInvalid, match="it says it is version 3"):
        decode("x", encode(prepare().draft, version=3), version=4)


def _place(body: Any, path: str) -> tuple[Any, str]:
    *way, last = path.split(".")
    for step in way:
        body = body[int(step)] if step.isdigit() else body[step]
    return body, last


def _set(path: str, value: object) -> Any:
    return pytest.param(path, value, id=f"{path}={value!r:.30}")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        _set("version", 0),
        _set("version", "3"),
        _set("parent", 1),
        _set("parent_digest", "0" * 64),
        _set("transaction", "T"),
        _set("tasks", []),
        _set("tasks.0.classes", []),
        _set("tasks.0.classes", ["a", "a"]),
        _set("tasks.0.classes", ["a\nb"]),
        _set("tasks.0.name", "x" * 201),
        _set("tasks.0.heads", 0),
        _set("tasks.0.heads", 10**9),
        _set("tasks.0.attention_heads", 0),
        _set("tasks.0.attention_heads", 3),
        _set("tasks.0.attention_heads", None),
        _set("network.token", "nowhere"),
        _set("tasks.0.expert.kind", "classifier"),
        _set("tasks.0.expert.sha256", "../../etc/passwd"),
        _set("tasks.0.expert.sha256", "A" * 64),
        _set("tasks.0.expert.bytes", -1),
        _set("tasks.0.expert.bytes", 1 << 60),
        _set("tasks.0.expert.path", "/etc/passwd"),
        _set("tasks.0.expert", None),
        _set("deepened", ["unheard of"]),
        _set("classifier.kind", "expert"),
        _set("memory.0.class", "unheard of"),
        _set("memory.0.shard.kind", "held-out"),
        _set("memory.0.count", -1),
        _set("network.image_size", 7),
        _set("network.depth", 10**12),
        _set("preprocessing.image_size", 16),
        _set("preprocessing.std", [0.5, 0.5, 0.0]),
        _set("calibration.temperature", 0.0),
        _set("created", "today"),
        _set("surprise", 1),
    ],
)
def test_a_sealed_manifest_that_makes_no_sense_is_refused(path: str, value: object) -> None:
    body = _body()
    place, last = _place(body, path)
    place[last] = value
    with pytest.raises(RecordInvalid):
        decode("x", seal(body), version=3)


def test_a_parent_is_older_than_its_child() -> None:
    body = {**_body(), "parent": 3, "parent_digest": "0" * 64}
    with pytest.raises(RecordInvalid, match="a parent is older"):
        decode("x", seal(body), version=3)


def test_the_delta_of_a_child_is_one_expert_and_the_classifier() -> None:
    parent = _manifest()
    child = _manifest(2, parent=parent, seed=1)
    assert [ref.kind for ref in delta_of(child, parent)] == ["expert", "classifier"]
    assert expert_refs(child)[0] == expert_refs(parent)[0]
    assert delta_of(parent, None) == parent.model_shards


def _quick(*names: str) -> dict[str, Any]:
    """Describe tasks that have no expert, after the first one."""
    body = _body()
    quick: dict[str, Any] = {"heads": 0, "attention_heads": 0, "expert": None, "training": {}}
    body["tasks"] += [{**quick, "name": name, "classes": [f"{name}-0"]} for name in names]
    return {**body, "parent": 2, "parent_digest": "0" * 64}


def test_a_task_without_an_expert_has_no_shard_of_its_own() -> None:
    manifest = decode("x", seal(_quick("b", "c")), version=3)
    assert [task.expert is None for task in manifest.tasks] == [False, True, True]
    assert [ref.kind for ref in manifest.model_shards] == ["expert", "classifier"]
    assert b'"deepened"' not in seal(_quick("b"))
    assert manifest.new_classes == ("c-0",)


def _deepened(names: list[str], *, at: int, extended: tuple[str, ...] = ()) -> dict[str, Any]:
    body = {**_quick("b", "c"), "deepened": names, "extended": list(extended)}
    shard = {"kind": "expert", "sha256": "1" * 64, "bytes": 5}
    body["tasks"][at] |= {"heads": 1, "attention_heads": 1, "expert": shard}
    return body


def test_a_version_may_learn_an_expert_for_its_newest_tasks() -> None:
    manifest = decode("x", seal(_deepened(["b", "c"], at=2)), version=3)
    assert manifest.new_classes == ()
    assert change(manifest, None) == "learnt an expert for b, c"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(_deepened(["b"], at=2), id="not-the-newest"),
        pytest.param(_deepened(["c", "b"], at=2), id="in-another-order"),
        pytest.param(_deepened(["b", "c"], at=1), id="the-expert-is-not-the-last-task's"),
        pytest.param(_deepened(["c"], at=2, extended=("b-0",)), id="extends-as-well"),
        pytest.param({**_deepened(["c"], at=2), "parent": None, "parent_digest": None}, id="first"),
        pytest.param({**_quick("b"), "deepened": ["b"]}, id="without-an-expert"),
    ],
)
def test_deepened_tasks_that_make_no_sense_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RecordInvalid):
        decode("x", seal(body), version=3)


def _adapted(**others: object) -> dict[str, Any]:
    return {**_quick("b"), "adapted": True, **others}


def test_a_version_may_change_its_first_expert() -> None:
    manifest = decode("x", seal(_adapted()), version=3)
    assert manifest.new_classes == ()
    assert change(manifest, None).startswith("adapted the first expert to ")
    assert b'"adapted"' not in seal(_quick("b"))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(_adapted(parent=None, parent_digest=None), id="first"),
        pytest.param(_adapted(extended=["b-0"]), id="extends-as-well"),
        pytest.param({**_deepened(["b", "c"], at=2), "adapted": True}, id="deepens-as-well"),
        pytest.param(
            {**_deepened(["b", "c"], at=2), "deepened": [], "adapted": True}, id="is-read-by-others"
        ),
        pytest.param(_adapted(adapted=False), id="not-left-out"),
    ],
)
def test_adapted_versions_that_make_no_sense_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RecordInvalid):
        decode("x", seal(body), version=3)


def test_a_shard_that_is_named_twice_counts_once() -> None:
    manifest = _manifest()
    assert total_bytes((*manifest.model_shards, *manifest.model_shards)) == sum(
        ref.bytes for ref in manifest.model_shards
    )


def test_a_measured_agreement_survives_its_bytes() -> None:
    draft = prepare().draft
    metrics = draft.metrics.model_copy(update={"agreement": {"int8": 0.995}})
    sealed = encode(draft.model_copy(update={"metrics": metrics}), version=1)
    assert b'"agreement":{"int8":0.995}' in sealed
    assert decode("a version", sealed, version=1).metrics.agreement == {"int8": 0.995}


def _judged(gate: Gate | None, *, parent: int | None = None) -> bytes:
    draft = prepare().draft
    metrics = draft.metrics.model_copy(update={"gate": gate})
    ancestry = {"parent": parent, "parent_digest": "0" * 64 if parent else None}
    return encode(draft.model_copy(update={"metrics": metrics, **ancestry}), version=3)


def test_a_gate_survives_its_bytes() -> None:
    few = Gate(passed=True, new_images=0, not_judged=("new",))
    sealed = _judged(few)
    assert b'"new_images":0' in sealed
    assert b'"not_judged":["new"]' in sealed
    assert decode("a version", sealed, version=3).metrics.gate == few


@pytest.mark.parametrize(
    ("gate", "parent", "says"),
    [
        (None, None, "not judged"),
        (Gate(passed=True), 2, "passed"),
        (Gate(passed=True, new_images=4, not_judged=("new",)), None, "not judged: 4 images"),
        (
            Gate(passed=True, new_images=1, old_images=80, not_judged=("new",)),
            2,
            "not judged: 1 image of new classes",
        ),
        (
            Gate(passed=True, new_images=0, not_judged=("new", "old")),
            2,
            "not judged: no images of new classes and no images of old classes",
        ),
        (Gate(passed=False, reasons=("it fell",)), 2, "refused: it fell"),
        (Gate(passed=False, forced=True, reasons=("it fell",)), 2, "overruled: it fell"),
    ],
)
def test_the_verdict_says_by_how_many_images_where_they_are_too_few(
    gate: Gate | None, parent: int | None, says: str
) -> None:
    assert verdict(decode("a version", _judged(gate, parent=parent), version=3)) == says


def test_a_network_that_two_versions_have_in_common_is_checked_once() -> None:
    first, second = _manifest(1), _manifest(2, accuracy=0.25)
    assert first.spec is second.spec
    assert first.spec != _manifest(1, classes=("another", "name")).spec


def test_corrected_images_are_those_of_extended_classes() -> None:
    body = {**_quick("b"), "corrected": 2}
    with pytest.raises(RecordInvalid, match="no class was"):
        decode("x", seal(body), version=3)
    assert b'"corrected"' not in seal(_quick("b"))
