"""Hostile names and records: every one is refused, and nothing outside the store is touched."""

from __future__ import annotations

import copy
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from model_store.backends.base import Objects, check_object_name
from model_store.backends.local import LocalDirectory
from model_store.backends.s3 import ObjectStorage
from model_store.errors import DneError
from model_store.layout import version_name
from model_store.records.manifest import decode
from model_store.records.sealing import seal, unseal
from tests.campaigns import AddRow
from tests.faults import hostile
from tests.faults.hostile import Attack, Target, make_target, refused, snapshot
from tests.model_store.backends import MemoryObjects

pytestmark = pytest.mark.faults

MUTATIONS = 10_000
LONGEST_S = 5.0  # of processor time: reading 16 MiB of JSON, the largest record, takes seconds


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return make_target(tmp_path)


def run(attacks: Iterator[Attack]) -> tuple[list[str], list[tuple[float, str]]]:
    """The attacks that got through, and how much processor time each one took."""
    through, took = [], []
    for label, attempt in attacks:
        began_s = time.process_time()
        if not refused(attempt):
            through.append(label)
        took.append((time.process_time() - began_s, label))
    return through, took


@pytest.mark.long
@pytest.mark.parametrize(
    "group",
    [
        hostile.channels,
        hostile.links,
        hostile.manifests,
        hostile.records,
        hostile.chains,
        hostile.signatures,
        hostile.shards,
    ],
    ids=lambda group: group.__name__,
)
def test_hostile(
    group: Callable[[Target], Iterator[Attack]], target: Target, tmp_path: Path
) -> None:
    attacks = list(group(target))
    before = snapshot(tmp_path, but=target.root)
    through, took = run(iter(attacks))
    assert through == []
    assert max(took)[0] < LONGEST_S, max(took)
    assert snapshot(tmp_path, but=target.root) == before
    assert len(took) > 5


@pytest.mark.parametrize("backend", ["directory", "memory", "object storage"])
def test_hostile_names(
    backend: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects: Objects = MemoryObjects()
    if backend == "directory":
        objects = LocalDirectory(target.root)
    if backend == "object storage":
        # Nobody listens there: a name that got as far as a request would fail otherwise.
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setattr(ObjectStorage, "_prove", lambda self: pytest.fail("it was sent"))
        objects = ObjectStorage("s3://bucket/prefix")
    before = snapshot(tmp_path, but=tmp_path / "none")
    through, took = run(hostile.names(objects))
    assert through == []
    assert max(took)[0] < 0.1, max(took)
    assert snapshot(tmp_path, but=tmp_path / "none") == before


def test_an_honest_store_is_not_refused(target: Target) -> None:
    """Or the tests above would pass with a store that takes nothing at all."""
    assert target.store.verify(trust=target.trust).problems == ()
    body = target.body()
    target.plant(version_name(3), seal(body))
    assert target.store.manifest(3).parent == 2
    assert target.store.verify(3).problems == ()


def test_few_changes_of_a_signed_manifest(target: Target) -> None:
    outcomes = _mutate(target, times=500, seed=1)
    assert outcomes["taken"] == 0
    assert outcomes["by its signature"] > 50  # a change that only the signature gives away


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_campaign(target: Target, tmp_path: Path, fault_row: AddRow) -> None:
    attacks = list(hostile.all_attacks(target))
    before = snapshot(tmp_path, but=target.root)
    through, took = run(iter(attacks))
    assert through == []
    outcomes = _mutate(target, times=MUTATIONS, seed=2)
    assert outcomes["taken"] == 0
    strange = _strange_names(target, times=MUTATIONS, seed=3)
    assert strange > MUTATIONS // 2
    assert snapshot(tmp_path, but=target.root) == before
    tried = len(took) + MUTATIONS + strange
    fault_row(
        "hostile names and manifests",
        f"table of {len(took)} attacks, {MUTATIONS:,} changed signed manifests, "
        f"{strange:,} random names",
        f"{tried:,} of {tried:,} refused, 0 writes outside the root, "
        f"longest {1000 * max(took)[0]:.0f} ms",
    )


def _mutate(target: Target, *, times: int, seed: int) -> Counter[str]:
    """Changes something in a signed manifest, seals it anew, and shows it to a strict reader."""
    numbers = random.Random(seed)
    sealed = (target.root / version_name(2)).read_bytes()
    original = unseal("x", sealed)
    del original["digest"]
    outcomes: Counter[str] = Counter()
    while outcomes.total() < times:
        body = copy.deepcopy(original)
        _change_somewhere(body, numbers)
        if body == original and json.dumps(body) == json.dumps(original):
            continue
        outcomes[_judged(target, body)] += 1
    return outcomes


def _judged(target: Target, body: dict[str, Any]) -> str:
    try:
        manifest = decode("x", seal(body), version=2)
    except DneError:
        return "by its content"
    try:
        target.trust.check(manifest, store=target.store.id)
    except DneError:
        return "by its signature"
    return "taken"


ODD: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    1.0,
    0.5,
    1e308,
    10**30,
    True,
    None,
    "",
    "a",
    "0" * 64,
    "..",
    "\x00",
    [],
    {},
)


def _change_somewhere(node: Any, numbers: random.Random) -> None:
    """Walks down to a random member and replaces, removes, doubles or nudges it."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = numbers.choice(keys)
        inner = node[key]
        if isinstance(inner, dict | list) and inner and numbers.random() < 0.8:
            node = inner
            continue
        break
    move = numbers.randrange(4)
    if move == 0:
        node[key] = copy.deepcopy(numbers.choice(ODD))
    elif move == 1:
        del node[key]
    elif isinstance(inner, str) and inner:
        at = numbers.randrange(len(inner))
        node[key] = inner[:at] + numbers.choice("0123456789abcdef") + inner[at + 1 :]
    elif isinstance(inner, int | float):
        node[key] = inner + numbers.choice((1, -1, 0.25))
    elif isinstance(node, list):
        node.append(copy.deepcopy(inner))
    else:
        node[f"{key}x"] = copy.deepcopy(inner)


def _strange_names(target: Target, *, times: int, seed: int) -> int:
    """Random names from a hostile alphabet, through every verb; how many were hostile."""
    numbers = random.Random(seed)
    parts = ("..", ".", "/", "\\", "%2e", "%2f", "\x00", "a", "versions", "outside", "~", " ", "é")
    objects, hostile_names = LocalDirectory(target.root), 0
    for _ in range(times):
        name = "".join(numbers.choices(parts, k=numbers.randrange(1, 9)))
        if not refused(partial(check_object_name, name)):
            continue  # it is the name of an object
        hostile_names += 1
        assert refused(partial(objects.create, name, b"hostile"))
        assert refused(partial(objects.read, name, max_bytes=10))
        assert refused(partial(objects.list, name))
        assert refused(partial(objects.delete, name))
    return hostile_names
