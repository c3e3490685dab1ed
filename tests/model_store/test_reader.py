"""FORMAT.md is enough: a short reader with three standard modules reads what the store writes."""

from __future__ import annotations

import ast
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model_store.codec import ShardWeights, load_network
from model_store.layout import shard_name
from model_store.records.channel import decode_record
from model_store.records.signing import new_signer
from model_store.store.store import Store
from tests.model_store import reader
from tests.model_store.drafts import prepare, publish_lineage, with_statistics
from tests.tiny_versions import publish_tiny

Read = Callable[[str], bytes]


@pytest.fixture
def store(location: str) -> Store:
    return Store.open(location)


def reading(location: str) -> tuple[Read, Callable[[str], list[str]]]:
    """Nothing but files: no code of ours stands between the reader and the store."""
    root = Path(location)

    def names(folder: str) -> list[str]:
        return [str(path.relative_to(root)) for path in (root / folder).iterdir()]

    return lambda name: (root / name).read_bytes(), names


def test_the_reader_is_short_and_needs_three_standard_modules() -> None:
    source = Path(reader.__file__).read_text()
    imported = {
        name.name.partition(".")[0] if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert imported == {"json", "hashlib", "struct"}
    assert len(source.splitlines()) < 120


def test_it_finds_what_the_channel_names(store: Store) -> None:
    publish_lineage(store, 3)
    store.rollback(channel="production", to=2, actor="é@b", reason="\n\"'\\\x7f\u2028 zurück")
    read, names = reading(store.location)
    record, manifest = reader.read_channel(read, names, "production")
    assert (record["number"], record["mode"], record["target"]) == (4, "pin", 2)
    assert record["reason"] == store.history("production")[-1].reason
    assert manifest["digest"] == store.manifest(2).digest
    parent = reader.read_manifest(read, manifest["parent"])
    assert parent["digest"] == manifest["parent_digest"]


def test_it_reads_every_weight_to_the_last_bit(store: Store) -> None:
    first = publish_tiny(store, tasks=[("letters", ["a", "b"])])
    second = publish_tiny(store, tasks=[("digits", ["0"])], parent=first, seed=1)
    read, _ = reading(store.location)
    found = reader.read_model(read, reader.read_manifest(read, 2))
    weights = load_network(store.read_shard, second).state_dict()
    assert found.keys() == weights.keys()
    for name, (shape, values) in found.items():
        assert list(weights[name].shape) == shape
        assert torch.equal(weights[name].flatten(), torch.tensor(values))


def test_it_reads_what_a_store_has_borrowed(store: Store, tmp_path: Path) -> None:
    publish_tiny(store)
    acme = Store.create(str(tmp_path / "acme"), alternates=[store.location])
    weights = load_network(acme.read_shard, publish_tiny(acme)).state_dict()
    read, _ = reading(acme.location)
    (alternate,) = json.loads(read("store.json"))["alternates"]
    beside, _ = reading(f"{acme.location}/{alternate['location']}")
    lender = reader.unseal(beside("store.json"), reader.STORE)
    assert lender["id"] == alternate["id"]

    def either(name: str) -> bytes:
        try:
            return read(name)
        except FileNotFoundError:
            return beside(name)

    manifest = reader.read_manifest(read, 1)
    assert reader.read_model(either, manifest).keys() == weights.keys()
    with pytest.raises(FileNotFoundError):
        reader.read_model(read, manifest)


def test_it_reads_the_images_that_are_in_use(store: Store) -> None:
    prepare(images=3).publish(store)
    read, _ = reading(store.location)
    (entry, _) = reader.read_manifest(read, 1)["memory"]
    assert reader.read_images(read, entry) == [b"class-0a 0 0", b"class-0a 0 1", b"class-0a 0 2"]
    assert reader.read_images(read, {**entry, "count": 1}) == [b"class-0a 0 0"]
    with pytest.raises(ValueError, match="fewer images"):
        reader.read_images(read, {**entry, "count": 4})


def test_it_knows_what_was_signed(store: Store, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    prepared = prepare()
    signer = new_signer(tmp_path / "key.pem")
    store.publish(prepared.draft, shards=prepared.shards, signer=signer)
    read, _ = reading(store.location)
    manifest = reader.read_manifest(read, 1)
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(manifest["signature"]["key"]))
    value = bytes.fromhex(manifest["signature"]["value"])
    key.verify(value, reader.signed_message(manifest))


def test_it_refuses_every_record_with_a_flipped_bit(store: Store) -> None:
    publish_lineage(store, 1)
    read, names = reading(store.location)
    reader.read_channel(read, names, "production")
    for name in ("store.json", "versions/00000001.json", "channels/production/00000001.json"):
        sealed = read(name)
        for position in range(0, len(sealed), 7):
            flipped = bytearray(sealed)
            flipped[position] ^= 1

            def damaged(asked: str, name: str = name, data: bytes = bytes(flipped)) -> bytes:
                return data if asked == name else read(asked)

            with pytest.raises(ValueError, match=r"\w"):
                reader.read_channel(damaged, names, "production")


def test_it_refuses_a_damaged_shard_and_another_records_bytes(store: Store) -> None:
    publish_lineage(store, 2)
    read, names = reading(store.location)
    ref = store.manifest(1).classifier.model_dump()
    for position in range(8 * ref["bytes"]):
        flipped = bytearray(read(shard_name(ref["sha256"])))
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(ValueError, match="damaged"):
            reader.read_shard(lambda name, data=bytes(flipped): data, ref)
    records = Path(store.location, "channels/production")
    shutil.copy(records / "00000001.json", records / "00000003.json")
    with pytest.raises(ValueError, match="another one than its name"):
        reader.read_channel(read, names, "production")


def test_it_reads_the_statistics_of_a_class(store: Store) -> None:
    one = with_statistics(prepare(), count=3).publish(store)
    read, _ = reading(store.location)
    manifest = reader.read_manifest(read, 1)
    mean, columns = reader.read_statistics(read, manifest, manifest["statistics"][0])
    assert (len(mean), len(columns), len(columns[0])) == (4, 4, 2)
    weights = ShardWeights(store.read_shard(one.statistics[0].shard))
    assert torch.equal(weights["factor"].T, torch.tensor(columns))


def test_both_readers_agree_on_how_a_number_is_written(store: Store) -> None:
    """Shares that have no short decimal form, and the floats next to the documented borders."""
    edges = (0.1, 1 / 3, 1e-4, 9.999999999999999e-05, 1.0, struct.unpack("<d", b"\x01" * 8)[0])
    for seed, accuracy in enumerate(edges):
        manifest = prepare(accuracy=accuracy, seed=seed, task=f"t{seed}").publish(store)
        read, _ = reading(store.location)
        found = reader.read_manifest(read, manifest.version)
        assert found["metrics"]["accuracy"]["all"] == accuracy


def test_the_members_that_it_knows_are_those_of_the_store(store: Store) -> None:
    publish_lineage(store, 1)
    sealed = Path(store.location, "channels/production/00000001.json").read_bytes()
    record = decode_record("x", sealed, channel="production", number=1)
    assert {*type(record).model_fields, "digest"} == reader.RECORD | reader.UNSIGNED
    sometimes = {"extended", "retired", "signature"}
    known = reader.MANIFEST | reader.LEFT_OUT | sometimes
    assert {*type(store.manifest(1)).model_fields} == known
