"""The client, `dne predict` and `dne` on a real server with versions that the real trainer made."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

import dne_client
from dne_client import AsyncClient, BadImage, BadInput, Client, NotAllowed, NotFound, Unreachable
from dne_client.__main__ import main as dne
from tests.live_server import TOKEN, Live, live_server, png
from tests.trained_store import TrainedStore


@pytest.fixture(scope="module")
def live(trained_store: TrainedStore) -> Iterator[Live]:
    with live_server(trained_store.location) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    with Client(live.url) as made:
        yield made


@pytest.fixture
def photos(trained_store: TrainedStore, tmp_path: Path) -> Path:
    """A folder with two images, a bad file and a text."""
    folder = tmp_path / "photos"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.png").write_bytes(trained_store.image("a"))
    (folder / "inner/zero.png").write_bytes(trained_store.image("0"))
    (folder / "inner/bad.png").write_bytes(b"no image")
    (folder / "read me.txt").write_text("not an image")
    return folder


def test_an_image_may_be_given_in_any_form(client: Client, tmp_path: Path) -> None:
    data = png(1, size=16)
    path = tmp_path / "one.png"
    path.write_bytes(data)
    picture = PIL.Image.open(io.BytesIO(data))
    array = np.asarray(picture)
    forms: list[dne_client.Image] = [data, path, str(path), io.BytesIO(data), picture, array]
    with path.open("rb") as file:
        answers = [client.predict(one, top_k=3) for one in [*forms, file]]
    assert len({(one.label, one.score, one.top) for one in answers}) == 1
    assert len(answers[0].top) == 3


@pytest.mark.parametrize(
    "wrong", [np.zeros((4, 4, 2), np.uint8), np.zeros((4, 4)), 7, io.StringIO("text")]
)
def test_what_is_no_image_is_refused_before_it_is_sent(client: Client, wrong: object) -> None:
    with pytest.raises(BadInput):
        client.predict(wrong)  # type: ignore[arg-type]


def test_answers_are_those_of_the_http_interface(client: Client, live: Live) -> None:
    data = png(2, size=16)
    found = client.predict(data)
    raw = live.predict(data).json()
    (said,) = raw["predictions"]
    assert (found.version, found.label, found.score) == (
        raw["version"],
        said["label"],
        said["score"],
    )
    assert found.unknown == said["unknown"]
    assert found.unknown_score == said["unknown_score"]


def test_versions_and_classes_are_typed(client: Client, trained_store: TrainedStore) -> None:
    page = client.versions(limit=3)
    assert page.served == trained_store.served
    assert page.total == len(trained_store.versions)
    assert len(page.versions) == 3
    assert page.next_before is not None
    older = client.versions(before=page.next_before)
    assert [one.version for one in (*older.versions, *page.versions)] == list(
        trained_store.versions
    )
    refused = next(one for one in older.versions if one.version == trained_store.refused)
    assert refused.gate == "refused"
    assert refused.reasons
    details = client.version(trained_store.first)
    assert details.classes == ("a", "b")
    assert details.raw["shards"]
    assert tuple(one.label for one in client.classes()) == trained_store.classes
    assert client.ready().version == trained_store.served


def test_errors_are_those_of_the_server(client: Client, live: Live) -> None:
    with pytest.raises(NotFound):
        client.version(9999)
    with pytest.raises(BadImage):
        client.predict(b"no image")
    with pytest.raises(NotAllowed):
        client.rollback()


def test_nobody_there_is_told_in_a_sentence() -> None:
    once = dne_client.Retries(attempts=1)
    with (
        Client("http://127.0.0.1:9", retries=once) as client,
        pytest.raises(Unreachable, match="no answer came"),
    ):
        client.ready()


def test_a_channel_is_moved(trained_copy: TrainedStore) -> None:
    with live_server(trained_copy.location) as live:
        live.wait_until_ready()
        with Client(live.url, token=TOKEN) as client:
            assert client.rollback(trained_copy.first, reason="test").version == trained_copy.first
            assert client.resume().version == trained_copy.served
            assert client.promote(trained_copy.second).version == trained_copy.second


def test_the_client_with_await_answers_alike(live: Live, trained_store: TrainedStore) -> None:
    async def ask() -> None:
        async with AsyncClient(live.url) as client:
            assert (await client.ready()).version == trained_store.served
            assert (await client.predict(png(3))).version == trained_store.served
            assert (await client.versions()).total == len(trained_store.versions)
            assert (await client.version(1)).version == 1
            assert await client.classes(1)
            with pytest.raises(NotAllowed):
                await client.rollback()
            with pytest.raises(NotAllowed):
                await client.promote(1)
            with pytest.raises(NotAllowed):
                await client.resume()

    asyncio.run(ask())


def test_dne_predict_prints_a_table(
    live: Live, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dne(["predict", str(photos), "--url", live.url]) == 1
    out = capsys.readouterr().out
    assert "a.png" in out
    assert "zero.png" in out
    assert "failed: 422" in out
    assert "read me.txt" not in out
    assert "2 images answered by version" in out
    assert "1 failed" in out


def test_dne_predict_prints_json_on_the_last_line(
    live: Live, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = dne(["predict", str(photos / "a.png"), "--url", live.url, "--json", "--version", "1"])
    whole = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert (whole["answered"], whole["failed"], whole["versions"]) == (1, 0, [1])
    assert whole["predictions"][0]["label"] in {"a", "b"}


def test_dne_predict_prints_csv_and_json_lines(
    live: Live, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dne(["predict", str(photos), "--url", live.url, "--format", "csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [Path(row["file"]).name for row in rows] == ["a.png", "bad.png", "zero.png"]
    assert rows[1]["error"].startswith("422")
    assert rows[0]["unknown"] in {"true", "false"}
    dne(["predict", str(photos), "--url", live.url, "--format", "jsonl"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["file"] for row in lines] == [row["file"] for row in rows]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["predict", "gone.png"], "gone.png does not exist"),
        (["predict", "."], "holds no images"),
        (["predict", __file__, "--url", "ftp://x"], "write http://HOST:PORT"),
    ],
)
def test_wrong_usage_is_a_sentence_and_code_2(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dne(arguments) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "hint"), [("trian", "did you mean train?"), ("xyz", "`dne --help` lists all")]
)
def test_a_command_that_there_is_not_is_one_sentence_and_code_2(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        dne([word, "add-task"])
    assert capsys.readouterr().err == f"error: dne has no command {word!r}: {hint}\n"


def test_dne_runs_the_other_commands(
    trained_store: TrainedStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dne"])
    assert dne(["store", "list", "--store", str(trained_store.location), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["versions"]


def test_the_client_needs_neither_torch_nor_pydantic() -> None:
    """It is installed with httpx alone on machines that only ask."""
    program = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'pydantic', 'fastapi', 'PIL', 'cryptography', 'rich'):\n"
        "    sys.modules[name] = None\n"
        "from dne_client.__main__ import main\n"
        "sys.exit(main(['predict', '--help']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--connections" in done.stdout


def test_a_reader_that_has_gone_is_no_fault() -> None:
    command = f"{sys.executable} -m dne_client --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode in {0, 1}
    assert done.stderr == ""
