"""Kept images are shown and corrected over HTTP, and with `dne-store relabel`."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from model_store.cli.main import main as dne_store
from model_store.loop.corrections import list_corrections
from model_store.maintenance.forget import forget_class
from model_store.store.store import Store
from tests.live_server import TOKEN, Live, assert_problem, live_server
from tests.trained_store import RETIRED, TrainedStore

BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def live(trained_copy: TrainedStore) -> Iterator[Live]:
    with live_server(trained_copy.location) as live:
        live.wait_until_serving(trained_copy.served)
        yield live


def kept(live: Live, label: str, **query: Any) -> dict[str, Any]:
    version = live.http.get("/readyz").json()["version"]
    answer = live.http.get(
        f"/versions/{version}/kept", params={"label": label, **query}, headers=BEARER
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    found: dict[str, Any] = answer.json()
    return found


def waiting(live: Live) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = live.http.get("/jobs", headers=BEARER).json()["waiting"][
        "corrections"
    ]
    return found


def test_a_kept_image_is_looked_at_and_moved(live: Live) -> None:
    found = kept(live, "0")
    assert found["total"] == len(found["images"]) > 2
    assert found["images"][0]["name"] == "exemplar 1 of 0"
    for one in found["images"]:
        picture = Image.open(io.BytesIO(base64.b64decode(one["data"])))
        assert max(picture.size) <= 96
    second = found["images"][1]
    alone = kept(live, "0", image=[second["sha256"]])
    assert [one["name"] for one in alone["images"]] == ["exemplar 2 of 0"]
    assert len(kept(live, "0", offset=1, limit=1)["images"]) == 1
    said = live.admin("/corrections", image=second["sha256"], label="0", to="1", reason="a one")
    assert said.status_code == 200, said.text
    (one,) = waiting(live)
    assert (one["label"], one["to"], one["reason"], one["why"]) == ("0", "1", "a one", None)
    assert one["actor"].startswith("http:")
    assert live.admin("/jobs").status_code == 200  # there is something to learn
    back = live.admin("/corrections", image=second["sha256"], label="0", to="0")
    assert back.status_code == 200
    assert waiting(live) == []


def test_what_cannot_be_is_said(live: Live, trained_copy: TrainedStore) -> None:
    image = kept(live, "0")["images"][0]["sha256"]

    def say(status: int, says: str = "", **body: Any) -> None:
        given = {"image": image, "label": "0", "to": "1", **body}
        assert_problem(live.admin("/corrections", **given), status, says=says)

    say(409, "knows no class 'zebra'", to="zebra")
    say(409, "keeps no such image of '1'", label="1", to="0")
    say(409, "was retired", to=RETIRED)
    say(409, "keeps no such image", image="0" * 64)
    say(400, image="../x")
    say(400, more=1)
    version = live.http.get("/readyz").json()["version"]
    absent = {"label": "zebra"}
    answer = live.http.get(f"/versions/{version}/kept", params=absent, headers=BEARER)
    assert_problem(answer, 404, says="no class")
    assert_problem(live.http.get(f"/versions/{version}/kept", headers=BEARER), 400)
    assert live.http.get(f"/versions/{version}/kept?label=0").status_code == 401
    assert live.http.post("/corrections", json={}).status_code == 401
    store = Store.open(str(trained_copy.location))
    assert list_corrections(store) == []
    forget_class(store, "0", actor="tests", reason="asked for")
    assert kept(live, "0")["images"] == []
    say(409, "keeps no such image of '0'")


def test_the_command_takes_the_words_of_the_advice(
    trained_copy: TrainedStore, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> tuple[int, dict[str, Any]]:
        code = dne_store(["relabel", *words, "--store", str(trained_copy.location), "--json"])
        lines = capsys.readouterr().out.splitlines()
        return code, json.loads(lines[-1]) if lines else {}

    code, told = run("exemplar 2 of 0", "--to", "1", "--reason", "a one")
    assert (code, told["label"], told["to"], told["reason"]) == (0, "0", "1", "a one")
    assert run("held-out image 1 of 0", "--out")[0] == 0
    code, listed = run()
    assert [one["to"] for one in listed["corrections"]] == ["1", None]
    assert run("exemplar 999 of 0", "--out")[0] == 1
    assert run("starfish/032.jpg", "--out")[0] == 2
    assert run("exemplar 2 of 0")[0] == 2
    assert run("--out")[0] == 2
    plain = ["relabel", "--store", str(trained_copy.location)]
    assert dne_store(plain) == 0
    assert "2 corrections for the version after" in capsys.readouterr().out
    assert dne_store(["relabel", "exemplar 1 of 0", "--out", *plain[1:]]) == 0
    assert "exemplar 1 of 0: taken out" in capsys.readouterr().out


def test_no_store_and_no_version_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Store.create(str(tmp_path / "models"))
    assert dne_store(["relabel", "--store", str(tmp_path / "models")]) == 1
    assert "names no version yet" in capsys.readouterr().err
