"""Save, load, the same logits; and bytes that are never trusted."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from model_store.codec import encode_classifier, encode_expert, encode_images, load_network
from model_store.errors import ShardCorrupt
from model_store.network.expert import Expert
from model_store.network.network import Network
from model_store.records.manifest import Draft, Preprocessing, ShardRef, geometry_of, task_record
from model_store.store.shard import check_shard, decode_images, expected_tensors, shard_ref
from tests.model_store.networks import IN_SEQUENCE, grown, images, task

Shards = dict[str, bytes]


def version_of(network: Network) -> tuple[Draft, Shards]:
    """Encode a network as a draft and its shards."""
    shards: Shards = {}

    def keep(ref: ShardRef, data: bytes) -> ShardRef:
        shards[ref.sha256] = data
        return ref

    tasks = []
    for index, one in enumerate(network.spec.tasks):
        data = encode_expert(network, index)
        expert = keep(shard_ref("expert", data), data)
        tasks.append(task_record(one, expert=expert))
    data = encode_classifier(network)
    draft = Draft(
        transaction="0" * 32,
        network=geometry_of(network.spec),
        preprocessing=Preprocessing(image_size=network.spec.image_size),
        tasks=tuple(tasks),
        classifier=keep(shard_ref("classifier", data), data),
        created="2026-01-01T00:00:00Z",
        software="test",
    )
    return draft, shards


def in_sequence() -> Network:
    """The token in the sequence, and a first expert whose attention is cut in another way."""
    network = Network(IN_SEQUENCE)
    network.expand(task("first", heads=4, attention_heads=2))
    network.expand(task("second", heads=1))
    return network.eval()


@pytest.mark.parametrize("grow", [lambda: grown([2, 1, 2]), in_sequence])
def test_a_network_that_was_saved_and_loaded_gives_the_same_logits_bit_for_bit(
    grow: Callable[[], Network],
) -> None:
    network = grow()
    draft, shards = version_of(network)
    loaded = load_network(lambda ref: shards[ref.sha256], draft)
    batch = images(4)
    with torch.no_grad():
        assert torch.equal(loaded(batch), network(batch))


OTHER_PROCESS = """
import json, pathlib, sys, torch
from model_store.codec import load_network
from model_store.records.manifest import Draft
from tests.model_store.networks import images
folder = pathlib.Path(sys.argv[1])
draft = Draft.model_validate_json((folder / "draft.json").read_bytes())
network = load_network(lambda ref: (folder / ref.sha256).read_bytes(), draft)
with torch.no_grad():
    print(network(images(4)).numpy().tobytes().hex())
"""


@pytest.mark.long
def test_the_logits_are_the_same_in_another_process(tmp_path: Path) -> None:
    network = grown([2, 1])
    draft, shards = version_of(network)
    (tmp_path / "draft.json").write_text(draft.model_dump_json(by_alias=True))
    for sha256, data in shards.items():
        (tmp_path / sha256).write_bytes(data)
    other = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    with torch.no_grad():
        assert other.stdout.strip() == network(images(4)).numpy().tobytes().hex()


def test_old_expert_shards_keep_their_names_when_the_network_grows() -> None:
    before, _ = version_of(grown([2, 1]))
    after, _ = version_of(grown([2, 1, 1]))
    assert after.experts[:2] == before.experts


def test_loading_reads_only_the_experts_that_are_not_known() -> None:
    parent, parent_shards = version_of(grown([2, 1]))
    child, child_shards = version_of(grown([2, 1, 1]))
    read: list[str] = []

    def reading(shards: Shards, ref: ShardRef) -> bytes:
        read.append(ref.sha256)
        return shards[ref.sha256]

    known: dict[str, Expert] = {}
    first = load_network(lambda ref: reading(parent_shards, ref), parent, known=known)
    read.clear()
    second = load_network(lambda ref: reading(child_shards, ref), child, known=known)
    assert read == [child.experts[2].sha256, child.classifier.sha256]
    assert second.experts[0] is first.experts[0]


def test_loaded_networks_learn_nothing() -> None:
    draft, shards = version_of(grown([2, 1]))
    loaded = load_network(lambda ref: shards[ref.sha256], draft)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert not loaded.training


def tampered(data: bytes, change: str) -> bytes:
    tensors = dict(load(data))
    name = sorted(tensors)[0]
    if change == "missing":
        del tensors[name]
    elif change == "added":
        tensors["experts.9.surprise"] = np.zeros(1, dtype=np.float32)
    elif change == "renamed":
        tensors["../" + name] = tensors.pop(name)
    elif change == "dtype":
        tensors[name] = tensors[name].astype(np.float64)
    elif change == "shape":
        tensors[name] = tensors[name][None]
    elif change in ("nan", "inf"):
        odd = tensors[name].copy()
        odd.flat[0] = float(change)
        tensors[name] = odd
    return save(tensors)


@pytest.mark.parametrize("change", ["missing", "added", "renamed", "dtype", "shape", "nan", "inf"])
def test_a_shard_that_is_not_what_the_spec_says_is_refused(change: str) -> None:
    draft, shards = version_of(grown([2, 1]))
    original = draft.experts[1]
    data = tampered(shards[original.sha256], change)
    forged = shard_ref("expert", data)  # its digest is right: only its content is wrong
    task = draft.tasks[1].model_copy(update={"expert": forged})
    forged_draft = draft.model_copy(update={"tasks": (draft.tasks[0], task)})
    shards[forged.sha256] = data
    with pytest.raises(ShardCorrupt, match=forged.sha256):
        load_network(lambda ref: shards[ref.sha256], forged_draft)


def test_large_but_finite_weights_are_accepted() -> None:
    draft, shards = version_of(grown([1]))
    tensors = {name: value.copy() for name, value in load(shards[draft.classifier.sha256]).items()}
    tensors["heads.0.bias"][:] = 3e38
    data = save(tensors)
    check_shard(
        shard_ref("classifier", data), data, expected=expected_tensors(draft, draft.classifier)
    )


def header(entries: str, payload: bytes = b"") -> bytes:
    return struct.pack("<Q", len(entries)) + entries.encode() + payload


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        struct.pack("<Q", 1 << 60) + b"{}",
        header("[]"),
        header("1"),
        header('{"a"'),
        header("[" * 100_000),
        header('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'),
        header('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"\x00" * 4),
        header('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}', b"\x00" * 4),
        header('{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', b"\x00" * 4),
        header('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', b"\x00" * 8),
        header('{"a":{"dtype":"PICKLE","shape":[1],"data_offsets":[0,4]}}', b"\x00" * 4),
        header('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
               '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\x00" * 4),
        header(json.dumps({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                           for i in range(10_001)})),
    ],
)  # fmt: skip
def test_malformed_headers_are_refused(data: bytes) -> None:
    for kind in ("expert", "memory"):
        ref = ShardRef(
            kind=kind,
            sha256=hashlib.sha256(data).hexdigest(),
            bytes=len(data),
        )
        with pytest.raises(ShardCorrupt):
            check_shard(ref, data, expected={"a": (1,)})


def test_images_come_back_in_their_order_and_a_prefix_is_enough() -> None:
    pictures = [b"first", b"second picture", b"3"]
    data = encode_images(pictures)
    check_shard(shard_ref("memory", data), data, expected=None)
    assert decode_images(data, count=3) == pictures
    assert decode_images(data, count=2) == pictures[:2]


@pytest.mark.parametrize("offsets", [[], [0], [1, 5], [0, 4], [0, 3, 3, 5], [0, 7, 5], [0, -1, 5]])
def test_image_offsets_that_do_not_fit_are_refused(offsets: list[int]) -> None:
    data = save(
        {"bytes": np.zeros(5, dtype=np.uint8), "offsets": np.asarray(offsets, dtype=np.int64)}
    )
    with pytest.raises(ShardCorrupt):
        check_shard(shard_ref("held-out", data), data, expected=None)
