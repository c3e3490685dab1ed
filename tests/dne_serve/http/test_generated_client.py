"""A client that openapi-python-client generates calls every operation: `make test SUITE=deploy`."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.dne_serve.http import generated_calls
from tests.live_server import TOKEN, live_server
from tests.openapi_answers import Document
from tests.packaging.project import tool
from tests.trained_store import TrainedStore

METHODS = ("get", "post", "put", "patch", "delete")
MEMORIES = ("cudasharedmemory", "systemsharedmemory")
REFUSED = {
    **{f"register_shared_memory_v2_{one}_region_region_register_post": 400 for one in MEMORIES},
    **{f"shared_memory_region_v2_{one}_region_region_status_get": 404 for one in MEMORIES},
    "set_log_v2_logging_post": 400,
    "set_model_trace_v2_models_model_trace_setting_post": 400,
    "set_trace_v2_trace_setting_post": 400,
    "show_image_versions_version_report_images_image_get": 404,
}
"""Operations that the server has for the protocol's sake, and refuses without a body or region; and
a picture of a version that shows none."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_generated_client_calls_every_operation(
    trained_copy: TrainedStore, tmp_path: Path
) -> None:
    generator = tool("openapi-python-client")
    with live_server(trained_copy.location, collect="unknown") as live:
        live.wait_until_ready()
        (tmp_path / "openapi.json").write_text(live.http.get("/openapi.json").text)
        made = subprocess.run(
            [generator, "generate", "--path", "openapi.json", "--meta", "none",
             "--output-path", "client"],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        assert "will not be generated" not in made.stdout + made.stderr, made.stdout
        (tmp_path / "a.png").write_bytes(trained_copy.image("a"))
        called = subprocess.run(
            [str(Path(generator).with_name("python")), generated_calls.__file__,
             str(tmp_path), live.url, TOKEN, str(tmp_path / "a.png"), str(trained_copy.third)],
            capture_output=True, text=True,
        )  # fmt: skip
        assert called.returncode == 0, called.stderr
        statuses = json.loads(called.stdout)
        document = Document(live.http)
        documented = {
            re.sub("_+", "_", one.says["operationId"]).strip("_"): one.says["responses"].keys()
            for method in METHODS
            for one in document.operations(method)
        }
    assert statuses.keys() == documented.keys()
    assert [one for one, status in statuses.items() if str(status) not in documented[one]] == []
    assert {name: status for name, status in statuses.items() if status >= 300} == REFUSED
