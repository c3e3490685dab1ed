"""docs/open-inference-protocol.md, executed as it stands there; only the port is another."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tritonclient.http as triton

from dne_serve.protocol_v2.answers import OUTPUTS
from dne_serve.protocol_v2.images import INPUTS
from dne_serve.protocol_v2.schemas import MAX_JSON_VALUES
from tests.live_server import Live, png

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs/open-inference-protocol.md"


def blocks(language: str, live: Live) -> list[str]:
    text = GUIDE.read_text().replace("127.0.0.1:8000", live.url.removeprefix("http://"))
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "photo.jpg").write_bytes(png(3))
    return tmp_path


def test_the_client_of_the_guide_runs(steady: Live, folder: Path) -> None:
    [program] = blocks("python", steady)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    version, answer, *_ = done.stdout.splitlines()
    assert version == "2"
    label, score = answer.split()
    [expected] = steady.predict(png(3)).json()["predictions"]
    assert label == expected["label"]
    assert float(score) == pytest.approx(expected["score"], abs=1e-5)


def test_the_shell_of_the_guide_runs(steady: Live, folder: Path) -> None:
    [_, curls] = blocks("sh", steady)
    done = subprocess.run(
        ["bash", "-euc", curls], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    answers = re.findall(r'{"model_name".*?]}(?={|$)', done.stdout)
    assert len(answers) == 2
    assert all(json.loads(answer)["model_version"] == "2" for answer in answers)


def test_the_guide_has_every_input_output_and_call() -> None:
    text = GUIDE.read_text()
    for name in (*INPUTS, *OUTPUTS):
        assert f"| `{name}` |" in text
    assert f"{MAX_JSON_VALUES:,} values" in text
    without_a_request = {"close", "generate_request_body", "parse_response_body"}
    calls = {name for name in vars(triton.InferenceServerClient) if not name.startswith("_")}
    told = {name: re.sub("_(system|cuda)_", "_…_", name) for name in calls - without_a_request}
    assert sorted(name for name, shown in told.items() if f"`{shown}`" not in text) == []
