"""Attacks on a store by names and by records: each one is a call that must be refused.

The attacker can put any bytes under any name of the store, and seals them as they should be:
only what they say can give them away. Signatures are what the attacker cannot make.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from model_store.backends.base import Objects
from model_store.backends.local import LocalDirectory
from model_store.errors import DneError, RecordInvalid
from model_store.layout import record_name, version_name
from model_store.records.manifest import Manifest, encode
from model_store.records.sealing import seal
from model_store.records.signing import Keys, Signer, Trust, new_signer
from model_store.store.shard import check_shard, expected_tensors, shard_ref
from model_store.store.store import Store
from tests.faults.hostile_json import bent_json, hostile_manifests
from tests.model_store.drafts import prepare, safetensors

Attack = tuple[str, Callable[[], object]]
"""What it is called, and the call."""

NEXT = version_name(3)
NAMES = (
    "", ".", "..", "/", "../outside/x", "shards/../../outside/x", "a/../../outside/x", "./x",
    "versions/../../outside/x", "/etc/passwd", "//etc/passwd", "versions//x", "x/", "/x",
    "a\x00b", "versions/00000001.json\x00.png", "%2e%2e/outside/x", "%2E%2E%2Foutside", "a%00b",
    "..%2foutside", "versions/%2e%2e/x", "\\..\\outside", "..\\outside", "c:\\x", ".hidden",
    "versions/.hidden", "Versions/x", "versions/é", "versions/\N{FULLWIDTH FULL STOP}" * 2,
    "versions/\N{ARABIC-INDIC DIGIT THREE}.json", "a\nb", "a b", "~/x", "$HOME", "x" * 4096,
    "versions/" + "x" * 4096, "a/" * 2000 + "a", "a/b/c/d/e", "versions/\ud800", "\u202ex",
    "-rf", "*",
)  # fmt: skip
CHANNELS = (
    "", ".", "..", "../outside", "/etc", "a/b", "a\x00", "%2e%2e", "a%2fb", "A", "é", "a b", "a\n",
    "-a", "_a", "a.b", "x" * 64, "x" * 4096, "production/../other", "\N{ARABIC-INDIC DIGIT ONE}",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A store of two signed versions, and beside it a folder that nobody has any business in."""

    store: Store
    root: Path
    outside: Path
    trust: Trust
    mallory: Signer

    @property
    def newest(self) -> Manifest:
        return self.store.manifest(2)

    def plant(self, name: str, data: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(data)

    def body(self) -> dict[str, Any]:
        """What version 3 could say, not signed and not sealed yet."""
        body: dict[str, Any] = json.loads(encode(self.newest, version=3))
        del body["digest"]
        return body | {"parent": 2, "parent_digest": self.newest.digest, "transaction": "3" * 32}


def make_target(folder: Path) -> Target:
    outside = folder / "outside"
    outside.mkdir(parents=True)
    (outside / "treasure").write_bytes(b"gold")
    ann = new_signer(folder / "ann.pem")
    store = Store.create(str(folder / "models"))
    signing = Store.open(store.location, keys=Keys(signer=ann, trust=Trust({"ann": ann.public})))
    parent: Manifest | None = None
    for seed in (0, 1):
        made = prepare(parent=parent, seed=seed)
        parent = store.publish(made.draft, shards=made.shards, signer=ann)
        signing.promote(parent.version, channel="production", actor="a@b", reason="")
    return Target(
        store=store,
        root=folder / "models",
        outside=outside,
        trust=Trust({"ann": ann.public}),
        mallory=new_signer(folder / "mallory.pem"),
    )


def snapshot(folder: Path, *, but: Path) -> dict[str, object]:
    """Every name and every byte in `folder` but those below `but`."""
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if but not in (path, *path.parents)
    }


def refused(attempt: Callable[[], object]) -> bool:
    """True: with an error for the user. What nobody foresaw gets through, and fails the test."""
    try:
        attempt()
    except DneError:
        return True
    return False


def names(objects: Objects) -> Iterator[Attack]:
    for name in NAMES:
        yield f"create {name[:40]!a}", partial(objects.create, name, b"hostile")
        yield f"read {name[:40]!a}", partial(objects.read, name, max_bytes=100)
        yield f"list {name[:40]!a}", partial(objects.list, name)
        yield f"delete {name[:40]!a}", partial(objects.delete, name)


def channels(target: Target) -> Iterator[Attack]:
    store = target.store
    who: dict[str, Any] = {"actor": "a@b", "reason": ""}
    for name in CHANNELS:
        yield f"head {name[:40]!a}", partial(store.head, name)
        yield f"history {name[:40]!a}", partial(store.history, name)
        yield f"promote {name[:40]!a}", partial(store.promote, 1, channel=name, **who)
        yield (
            f"rollback {name[:40]!a}",
            partial(store.rollback, channel=name, to=1, **who),
        )


def links(target: Target) -> Iterator[Attack]:
    """Symbolic links, pipes and folders where objects and folders of the store should be."""
    shutil.copytree(target.root, target.outside / "copy")
    made = prepare(parent=target.newest, seed=5)
    uses: list[tuple[str, Callable[[Store], object]]] = [
        ("store.json", lambda store: Store.open(store.location)),
        ("versions", lambda store: store.manifest(2)),
        ("versions/00000002.json", lambda store: store.manifest(2)),
        ("channels", lambda store: store.promote(1, channel="new", actor="a", reason="")),
        ("channels/production", lambda store: store.head("production")),
        ("channels/production/00000002.json", lambda store: store.record("production", 2)),
        ("shards", lambda store: store.read_shard(store.manifest(2).classifier)),
        ("tmp", made.publish),
        ("versions", made.publish),
        ("shards", made.publish),
    ]
    for number, (name, use) in enumerate(uses):
        kinds = ("link", "dangling", "pipe", *(["folder"] if name.endswith(".json") else []))
        for kind in kinds:
            yield (
                f"{kind} {name}",
                partial(
                    _use_replaced, target, name, kind=kind, use=use, root=f"models-{number}-{kind}"
                ),
            )


def _use_replaced(
    target: Target, name: str, *, kind: str, use: Callable[[Store], object], root: str
) -> None:
    here = target.root / root  # inside, so that only what leaves the store counts as outside
    shutil.copytree(target.outside / "copy", here)
    store = Store.open(str(here))
    path = here / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target.outside / ("copy" if kind == "link" else "nowhere") / name)
    use(store)


def manifests(target: Target) -> Iterator[Attack]:
    """Bytes of a version 3 that no reader may take."""
    for label, sealed in hostile_manifests(target.body()):
        yield f"manifest: {label}", partial(_read_planted, target, sealed)
    first = (target.root / version_name(1)).read_bytes()
    yield "manifest: replayed under another number", lambda: _read_planted(target, first)


def _read_planted(target: Target, sealed: bytes) -> None:
    target.plant(NEXT, sealed)
    target.store.manifest(3)


def records(target: Target) -> Iterator[Attack]:
    """Records 3 of the channel that no reader may take."""
    store = target.store
    sealed = (target.root / record_name("production", 2)).read_bytes()
    body = {**json.loads(sealed), "number": 3}
    del body["digest"]
    changes: dict[str, dict[str, Any]] = {
        "another number": {"number": 4},
        "another channel": {"channel": "staging"},
        "no such version": {"target": 77},
        "target 0": {"target": 0},
        "huge target": {"target": 10**30},
        "a real number": {"target": 2.0},
        "another digest": {"target_digest": "0" * 64},
        "a path for a digest": {"target_digest": "../../outside"},
        "unknown mode": {"mode": "force"},
        "long reason": {"reason": "x" * 2001},
        "format true": {"format": True},
        "format 1.0": {"format": 1.0},
        "a member more": {"path": "/etc/passwd"},
    }

    def follow(planted: bytes) -> None:
        target.plant(record_name("production", 3), planted)
        head = store.head("production")
        if head is not None:
            store.resolve(head)

    for label, change in changes.items():
        yield f"record: {label}", partial(follow, seal({**body, **change}))
    yield "record: replayed", lambda: follow(sealed)
    for label, planted in bent_json(body):
        yield f"record: {label}", partial(follow, planted)


def chains(target: Target) -> Iterator[Attack]:
    """Records that are right by themselves and wrong beside the others: `verify` walks them."""
    body = target.body()

    def verify(change: dict[str, Any]) -> None:
        target.plant(NEXT, seal({**body, **change}))
        _raise_first(target.store.verify(3).problems)

    digest = target.store.manifest(1).digest
    yield "parent of another digest", lambda: verify({"parent_digest": "0" * 64})
    yield "grandparent's digest", lambda: verify({"parent_digest": digest})
    yield "another parent", lambda: verify({"parent": 1})
    huge = copy.deepcopy(body["memory"])
    huge[0]["count"] = 10**9
    yield "more images than there are", lambda: verify({"memory": huge})
    vast = {**body["classifier"], "bytes": (1 << 48) - 1}
    yield "a vast shard", lambda: verify({"classifier": vast})
    other = {**body["classifier"], "sha256": body["tasks"][0]["expert"]["sha256"]}
    yield "a shard for another use", lambda: verify({"classifier": other})
    draft = prepare(parent=target.newest, seed=3)
    stale = draft.draft.model_copy(update={"parent_digest": digest})
    yield "publish on a wrong parent", lambda: target.store.publish(stale, shards=draft.shards)


def signatures(target: Target) -> Iterator[Attack]:
    """What a server that requires signatures must not take."""
    body, trusted = target.body(), target.newest.signature
    if trusted is None:
        raise ValueError("the newest version of the target is signed")
    forged = target.mallory.sign(body, kind="manifest", store=target.store.id)

    def take(signature: dict[str, Any] | None) -> None:
        target.plant(NEXT, seal({**body, "signature": signature}))
        target.trust.check(target.store.manifest(3), store=target.store.id)

    yield "unsigned", lambda: take(None)
    yield "wrong key", lambda: take(forged.model_dump())
    yield "trusted key, forged value", lambda: take({**forged.model_dump(), "key": trusted.key})
    yield "replayed signature", lambda: take(trusted.model_dump())
    yield "zero key", lambda: take({"key": "0" * 64, "value": "0" * 128})
    yield "capital letters", lambda: take({"key": trusted.key.upper(), "value": trusted.value})
    yield "short value", lambda: take({"key": trusted.key, "value": trusted.value[:-2]})
    mine = encode(target.newest, version=3, store=target.store.id, signer=target.mallory)

    def take_sealed() -> None:
        target.plant(NEXT, mine)
        target.trust.check(target.store.manifest(3), store=target.store.id)

    yield "rightly signed by someone else", take_sealed


def shards(target: Target) -> Iterator[Attack]:
    """Shards with the right size and digest whose headers lie."""
    manifest = target.newest
    expected = expected_tensors(manifest, manifest.classifier)
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps(one)
    headers = {
        "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "deep list": b"[" * 100_000,
        "doubled name": f'{{"a":{text},"a":{text}}}'.encode(),
        "too many tensors": json.dumps({f"t{i}": one for i in range(10_001)}).encode(),
        "huge shape": json.dumps({"a": {**one, "shape": [1 << 40, 1 << 40]}}).encode(),
        "huge offsets": json.dumps({"a": {**one, "data_offsets": [0, 1 << 62]}}).encode(),
        "negative": json.dumps({"a": {**one, "shape": [-1], "data_offsets": [4, 0]}}).encode(),
        "huge number": b'{"a":' + b"9" * 5000 + b"}",
        "pickle": b"\x80\x04K\x01.",
        "a path": json.dumps({"../../outside/x": one}).encode(),
    }
    data = [
        (label, len(header).to_bytes(8, "little") + header + bytes(4))
        for label, header in headers.items()
    ]
    data.append(("claims 2^63 bytes", (1 << 63).to_bytes(8, "little") + bytes(100)))
    data.append(("other names", safetensors({"a": ("F32", (1,), bytes(4))})))
    for label, made in data:
        ref = shard_ref("classifier", made)
        yield (
            f"shard: {label}",
            partial(check_shard, ref, made, expected=expected),
        )


def all_attacks(target: Target) -> Iterator[Attack]:
    yield from names(LocalDirectory(target.root))
    yield from channels(target)
    yield from links(target)
    for group in (manifests, records, chains, signatures, shards):
        yield from group(target)


def _raise_first(problems: tuple[str, ...]) -> None:
    if problems:
        raise RecordInvalid("the store", problems[0])
