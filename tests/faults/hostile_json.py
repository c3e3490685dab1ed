"""Records that are sealed as they should be, and say what no reader may take."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import Any

from model_store.records.sealing import MAX_RECORD_BYTES, canonical, seal

CHANGES: tuple[tuple[str, object], ...] = (
    ("version", 0),
    ("version", 4),
    ("version", 3.0),
    ("version", True),
    ("version", 10**30),
    ("format", 1.0),
    ("format", True),
    ("format", 2),
    ("parent", 3),
    ("parent", 4),
    ("parent", -1),
    ("parent", 10**30),
    ("parent", None),
    ("parent_digest", None),
    ("parent_digest", "../" * 21 + "x"),
    ("transaction", "../../outside"),
    ("transaction", "0" * 31 + "\n"),
    ("classifier.sha256", "../../../outside/treasure"),
    ("classifier.sha256", "/etc/passwd"),
    ("classifier.sha256", "%2e%2e%2f" * 7 + "a"),
    ("classifier.sha256", "\x00" * 64),
    ("classifier.sha256", "a" * 4096),
    ("classifier.sha256", "A" * 64),
    ("classifier.sha256", "a" * 64 + "\n"),
    ("classifier.bytes", 1 << 48),
    ("classifier.bytes", -1),
    ("classifier.bytes", 1e3),
    ("classifier.kind", "expert"),
    ("classifier.path", "/etc/passwd"),
    ("classifier.url", "http://127.0.0.1/x"),
    ("tasks", []),
    ("tasks", {}),
    ("tasks.0.name", "x" * 4096),
    ("tasks.0.name", "a\x00b"),
    ("tasks.0.name", "\u202egnp.exe"),
    ("tasks.0.name", "\x1b[2J"),
    ("tasks.0.classes", []),
    ("tasks.0.classes", ["../../outside"] * 2),
    ("tasks.0.classes", ["x" * 4096]),
    ("tasks.0.classes", ["a\nb"]),
    ("tasks.0.heads", 10**9),
    ("tasks.0.heads", 0),
    ("tasks.0.heads", 65536),
    ("tasks.0.expert.sha256", ".." * 32),
    ("tasks.0.training", {"a": {"b": 1}}),
    ("network.depth", 10**12),
    ("network.depth", 65536),
    ("network.image_size", 1 << 40),
    ("network.head_width", 65536),
    ("network.layer_norm_eps", 5e-324 * 0),
    ("network.surprise", 1),
    ("preprocessing.image_size", 10**9),
    ("preprocessing.std", [0.0, 0.5, 0.5]),
    ("preprocessing.mean", [0.5] * 1000),
    ("memory.0.count", 10**30),
    ("memory.0.count", -1),
    ("memory.0.class", "unheard of"),
    ("memory.0.shard.sha256", "../../outside/treasure"),
    ("calibration.temperature", 0.0),
    ("calibration.temperature", -1.0),
    ("calibration.temperature", 5e-324),
    ("calibration.temperature", 1e300),
    ("calibration.after.all", 1.5),
    ("unknown", {}),
    ("unknown", {"score": "os.system", "threshold": 0.5, "rate": 0.05, "images": 9}),
    ("unknown", {"score": "max-logit", "threshold": "0", "rate": 0.05, "images": 9}),
    ("unknown", {"score": "max-logit", "threshold": 0.5, "rate": 0.0, "images": 9}),
    ("metrics.gate", {"passed": "yes"}),
    ("metrics.gate", []),
    ("metrics.images", 1 << 60),
    ("created", "x" * 4096),
    ("software", "x" * 4096),
    ("signature", {}),
    ("signature", "0" * 192),
    ("surprise", {"__class__": "os.system"}),
)


def hostile_manifests(body: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    for path, value in CHANGES:
        changed = copy.deepcopy(body)
        *way, last = path.split(".")
        place: Any = changed
        for step in way:
            place = place[int(step)] if step.isdigit() else place[step]
        place[last] = value
        yield f"{path} = {value!a:.40}", seal(changed)
    many = copy.deepcopy(body)
    many["tasks"] = [
        {**body["tasks"][0], "name": f"t{i}", "classes": [f"c{i}"], "heads": 1,
         "expert": {**body["tasks"][0]["expert"], "sha256": f"{i:064x}"}}
        for i in range(60_000)
    ]  # fmt: skip
    many["memory"] = []
    many["network"] |= {"head_width": 1, "mlp_ratio": 1}
    yield "60,000 tasks", seal(many)
    yield from bent_json(body)


def bent_json(body: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """JSON that two readers could understand differently, or that could exhaust one."""
    good = seal(body)
    for depth in (150, 900, 100_000):
        deep = b'{"a":' + b"[" * depth + b"]" * depth + b"," + canonical(body)[1:]
        yield f"nested {depth} deep", _sealed_again(deep)
    yield "doubled key", _sealed_again(b'{"format":1,' + canonical(body)[1:])
    yield "doubled digest", good[:-1] + b',"digest":"' + b"0" * 64 + b'"}'
    yield "white space", _sealed_again(canonical(body).replace(b",", b", ", 1))
    yield "byte order mark", b"\xef\xbb\xbf" + good
    yield "NUL at the end", good + b"\x00"
    yield "cut short", good[:-1]
    yield "two records", good + good
    yield "empty", b""
    yield "17 MiB", b"{" + b" " * (MAX_RECORD_BYTES + 1) + b"}"
    yield "16 MiB of brackets", b"[" * MAX_RECORD_BYTES
    yield "UTF-16", good.decode().encode("utf-16")
    yield "a number of a million digits", _sealed_again(b'{"a":' + b"9" * 10**6 + b',"format":1}')
    yield "NaN", _sealed_again(b'{"a":NaN,' + canonical(body)[1:])


def _sealed_again(bare: bytes) -> bytes:
    return bare[:-1] + f',"digest":"{hashlib.sha256(bare).hexdigest()}"}}'.encode()
