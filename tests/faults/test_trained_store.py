"""One wrong bit in any object of a store that the real commands made."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from model_store.cli.main import main as dne_store
from model_store.layout import version_name
from tests.live_server import live_server
from tests.openapi_answers import Document
from tests.trained_store import TrainedStore

pytestmark = pytest.mark.faults

TRIED = 12
"""Objects; each time all of the store is read."""


@contextmanager
def one_wrong_bit(path: Path, *, numbers: random.Random) -> Iterator[None]:
    """Inside, one bit of a file is not what it was."""
    right = path.read_bytes()
    wrong = bytearray(right)
    wrong[numbers.randrange(len(right))] ^= 1 << numbers.randrange(8)
    path.write_bytes(wrong)
    try:
        yield
    finally:
        path.write_bytes(right)


def test_verify_names_whichever_object_has_a_wrong_bit(
    trained_copy: TrainedStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store, numbers = trained_copy.location, random.Random(1)
    parts = [path.relative_to(store).parts for path in sorted(store.rglob("*.*"))]
    # Advice is no part of a version: nothing is served or learnt from it.
    objects = [store.joinpath(*one) for one in parts if one[0] not in ("store.json", "advice")]
    assert {path.relative_to(store).parts[0] for path in objects} == {
        "shards",
        "versions",
        "channels",
    }
    for path in numbers.sample(objects, TRIED):
        with one_wrong_bit(path, numbers=numbers):
            assert dne_store(["verify", "--json", "--store", str(store)]) == 1
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        name = path.stem if path.suffix == ".safetensors" else str(path.relative_to(store))
        assert name in json.dumps(found["problems"]), path
    assert dne_store(["verify", "--store", str(store)]) == 0


def test_manifests_with_a_wrong_bit_hide_no_other_version(trained_copy: TrainedStore) -> None:
    numbers = random.Random(2)
    broken = [trained_copy.refused, trained_copy.branch]
    with ExitStack() as wrong:
        for version in broken:
            path = trained_copy.location / version_name(version)
            wrong.enter_context(one_wrong_bit(path, numbers=numbers))
        with live_server(trained_copy.location) as live:
            live.wait_until_ready()
            document = Document(live.http)
            answer = live.http.get("/versions")
            document.check(document.operation("get", "/versions"), answer)
            told = answer.json()["versions"]
            for version in trained_copy.versions:
                one = live.http.get(f"/versions/{version}")
                document.check(document.operation("get", "/versions/{version}"), one)
                assert one.status_code == (503 if version in broken else 200)
    assert [one["version"] for one in told if one["error"]] == broken
