"""`GET /classes/examples`: a few kept images of a class, to compare with while labelling."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from dne_serve.loop.routes import MAX_EXAMPLES
from model_store.cli.main import main as dne_store
from model_store.maintenance.forget import forget_class
from model_store.preprocess import THUMBNAIL_SIDE
from model_store.store import shard
from model_store.store.shard import decode_images
from model_store.store.store import Store
from tests.live_server import TOKEN, Live, assert_problem, live_server
from tests.tiny_versions import publish_tiny
from tests.trained_store import NEW_NAME, RENAMED, RETIRED, TrainedStore

BEARER = {"Authorization": f"Bearer {TOKEN}"}
HOSTILE = "<script>alert(1)<!--"


@pytest.fixture
def live(trained_copy: TrainedStore) -> Iterator[Live]:
    with live_server(trained_copy.location) as live:
        live.wait_until_serving(trained_copy.served)
        yield live


def ask(live: Live, label: str, headers: dict[str, str] = BEARER) -> httpx.Response:
    return live.http.get("/classes/examples", params={"label": label}, headers=headers)


def told(live: Live, label: str) -> dict[str, Any]:
    answer = ask(live, label)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    found: dict[str, Any] = answer.json()
    return found


def test_the_first_kept_images_of_each_class_are_shown_until_it_is_forgotten(
    live: Live, trained_copy: TrainedStore
) -> None:
    store = Store.open(str(trained_copy.location))
    manifest = store.manifest(trained_copy.served)
    entries = {one.class_name: one for one in (*manifest.held_out, *manifest.memory)}
    for label in trained_copy.classes:
        found = told(live, label)
        assert (found["version"], found["label"]) == (manifest.version, label)
        kept = decode_images(store.read_shard(entries[label].shard), count=entries[label].count)
        assert 0 < len(found["pictures"]) == min(MAX_EXAMPLES, len(kept))
        for one, original in zip(found["pictures"], kept, strict=False):
            assert one["type"] == "image/png"
            assert np.array_equal(pixels(base64.b64decode(one["data"])), pixels(original))
    forget_class(store, NEW_NAME, actor="tests", reason="asked to")
    gone = told(live, NEW_NAME)
    assert gone["pictures"] == []
    assert gone["note"] == "The images of this class were forgotten."


def test_a_class_that_the_version_does_not_answer_is_404(live: Live) -> None:
    for label in (RENAMED, RETIRED, "a/b", "../a", "", " ", HOSTILE):
        assert_problem(ask(live, label), 404, says="has no class")
    assert ask(live, "x" * 2000).status_code == 400
    assert live.http.get("/classes/examples", headers=BEARER).status_code == 400


def test_a_class_with_a_name_of_markup_is_shown_as_any_other(
    live: Live, trained_copy: TrainedStore
) -> None:
    where = ["--store", str(trained_copy.location)]
    assert dne_store(["rename-class", NEW_NAME, HOSTILE, *where]) == 0
    live.wait_until_serving(max(trained_copy.versions) + 1)
    found = told(live, HOSTILE)
    assert found["pictures"]
    assert found["label"] == HOSTILE
    assert ask(live, NEW_NAME).status_code == 404


def test_a_version_that_keeps_no_images_says_so(store: Store) -> None:
    manifest = publish_tiny(store)
    store.promote(manifest.version, channel="production", actor="tests", reason="")
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        found = told(live, manifest.classes[0])
    assert found["pictures"] == []
    assert found["note"] == "No image of this class is kept."


def pixels(data: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    assert max(image.size) <= THUMBNAIL_SIDE
    return np.asarray(image)


def test_a_shard_that_is_too_large_is_not_read_for_examples(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "MAX_KEPT_BYTES", 10)
    answer = ask(live, NEW_NAME).json()
    assert (answer["pictures"], answer["note"]) == (
        [],
        "The kept images of this class are too large to show.",
    )
