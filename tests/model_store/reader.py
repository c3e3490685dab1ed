"""Reads a store by FORMAT.md alone: what a reader in another language would have to do.

`read(name)` gives the bytes of an object, `names(folder)` the names of the objects below a folder.
"""

import hashlib
import json
import struct

STORE = {"digest", "format", "id"}
RECORD = {"actor", "channel", "digest", "format", "mode", "number", "reason", "target",
          "target_digest", "time", "transaction"}  # fmt: skip
MANIFEST = {"calibration", "classifier", "created", "digest", "extended", "format", "held_out",
            "memory", "metrics", "network", "parent", "parent_digest", "preprocessing", "retired",
            "signature", "software", "tasks", "transaction", "unknown", "version"}  # fmt: skip
UNSIGNED = {"signature"}  # channel records that nobody signed do not have it
LEFT_OUT = {
    "adapted",
    "corrected",
    "deepened",
    "doubt",
    "hierarchy",
    "statistics",
}  # most do not have these
ITEMS = {"F32": (4, "f"), "U8": (1, "B"), "I64": (8, "q")}


def refuse_unless(right, why):
    if not right:
        raise ValueError(why)


def bare_bytes(record, *without):
    body = {name: record[name] for name in record if name not in without}
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def unseal(sealed, members, perhaps=frozenset()):
    refuse_unless(len(sealed) <= 16777216, "the record is too large")
    record = json.loads(sealed.decode())
    refuse_unless(record.get("format") == 1, "this is another format")
    refuse_unless(record.keys() - perhaps == members, "a member is missing or not known")
    bare = bare_bytes(record, "digest")
    digest = hashlib.sha256(bare).hexdigest().encode()
    refuse_unless(sealed == bare[:-1] + b',"digest":"' + digest + b'"}', "the seal is broken")
    return record


def signed_message(record, kind="manifest"):
    """What `signature.value` signs with Ed25519; there is no such thing in these three modules."""
    body = {name: record[name] for name in record if name not in ("digest", "signature")}
    signed = {"kind": kind, "record": body, "store": record["signature"]["store"]}
    return b"dne-serve signature 2\n" + bare_bytes(signed)


def read_manifest(read, version):
    manifest = unseal(read(f"versions/{version:08d}.json"), MANIFEST, LEFT_OUT)
    refuse_unless(manifest["version"] == version, "the manifest is that of another version")
    return manifest


def read_channel(read, names, channel):
    """The newest record of a channel, and the manifest of the version that it names."""
    unseal(read("store.json"), STORE, {"alternates"})
    name = max(names(f"channels/{channel}"))
    record = unseal(read(name), RECORD, UNSIGNED)
    said = f"channels/{record['channel']}/{record['number']:08d}.json"
    refuse_unless(name == said, "the record is another one than its name says")
    manifest = read_manifest(read, record["target"])
    refuse_unless(manifest["digest"] == record["target_digest"], "the target is another one")
    return record, manifest


def read_shard(read, ref):
    """Tensors by name, each as (shape, values)."""
    data = read(f"shards/{ref['sha256'][:2]}/{ref['sha256']}.safetensors")
    digest = hashlib.sha256(data).hexdigest()
    refuse_unless((len(data), digest) == (ref["bytes"], ref["sha256"]), "the shard is damaged")
    (length,) = struct.unpack_from("<Q", data)
    refuse_unless(length <= 1 << 20, "the header is too large")
    header, payload, end, tensors = json.loads(data[8 : 8 + length]), 8 + length, 0, {}
    header.pop("__metadata__", None)
    for name, one in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        size, letter = ITEMS[one["dtype"]]
        begin, count = end, (one["data_offsets"][1] - end) // size
        end, product = begin + count * size, 1
        for side in one["shape"]:
            product *= side
        right = one["data_offsets"] == [begin, end] and count == product
        refuse_unless(right, "the tensors leave gaps or do not have their shapes")
        values = struct.unpack_from(f"<{count}{letter}", data, payload + begin)
        refuse_unless(all(value - value == 0 for value in values), "a number is not finite")
        tensors[name] = (one["shape"], values)
    refuse_unless(payload + end == len(data), "the tensors do not fill the shard")
    return tensors


def read_model(read, manifest):
    """All tensors that a server needs; the names begin with experts.<t>., heads.<t>. or doubt."""
    refs = [*(t["expert"] for t in manifest["tasks"]), *map(manifest.get, ("classifier", "doubt"))]
    return {name: tensor for ref in refs if ref for name, tensor in read_shard(read, ref).items()}


def read_images(read, entry):
    """The encoded images of one entry of `memory` or `held_out`, the most important one first."""
    tensors = read_shard(read, entry["shard"])
    (_, content), (_, offsets) = tensors["bytes"], tensors["offsets"]
    refuse_unless(entry["count"] < len(offsets), "there are fewer images than the manifest says")
    return [bytes(content[offsets[i] : offsets[i + 1]]) for i in range(entry["count"])]


def read_statistics(read, manifest, entry):
    """The mean, and the columns of the factor of the scatter, of one entry of `statistics`."""
    tensors = read_shard(read, entry["shard"])
    width = manifest["tasks"][0]["heads"] * manifest["network"]["head_width"]
    shapes = {"mean": [width], "factor": [min(entry["count"] - 1, width), width]}
    refuse_unless({name: one[0] for name, one in tensors.items()} == shapes, "no statistics")
    return tensors["mean"][1], [tensors["factor"][1][i::width] for i in range(width)]
