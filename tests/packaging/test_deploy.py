"""The container files name what exists. No image is built here: that needs a container engine."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dne_serve.health import url_of
from tests.packaging.project import COMMANDS, ROOT, options, pyproject

DEPLOY = ROOT / "deploy"
DOCKERFILES = [DEPLOY / "Dockerfile.cpu", DEPLOY / "Dockerfile.gpu"]
by_name = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(word, rest) of every instruction, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", dockerfile.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def values(dockerfile: Path, word: str) -> list[str]:
    return [rest for found, rest in instructions(dockerfile) if found == word]


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


@by_name
def test_what_is_copied_exists_and_is_let_through(dockerfile: Path) -> None:
    let_through = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    copied = {
        source
        for rest in values(dockerfile, "COPY")
        if not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert copied <= let_through
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_nothing_is_let_through_that_no_image_needs() -> None:
    let_through = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    copied = " ".join(rest for dockerfile in DOCKERFILES for rest in values(dockerfile, "COPY"))
    assert [name for name in let_through if name not in copied] == []


@by_name
def test_what_the_build_reads_is_copied(dockerfile: Path) -> None:
    """A missing readme or package would stop the build after many minutes."""
    copied = " ".join(values(dockerfile, "COPY"))
    project = pyproject()
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = [project["project"]["readme"], *project["project"]["license-files"], *packages]
    assert [name for name in needed if name not in copied] == []


@by_name
def test_installs_use_the_constraints_and_an_extra_that_exists(dockerfile: Path) -> None:
    installs = [rest for rest in values(dockerfile, "RUN") if rest.startswith("pip install")]
    assert installs
    pinned = ("-c constraints.txt", "--require-hashes")
    assert [rest for rest in installs if not any(one in rest for one in pinned)] == []
    extras = re.findall(r"\.\[(\w+)\]", " ".join(installs))
    assert extras
    assert set(extras) <= set(pyproject()["project"]["optional-dependencies"])


@by_name
def test_the_container_runs_a_real_command_and_not_as_root(dockerfile: Path) -> None:
    command, *arguments = json.loads(values(dockerfile, "CMD")[-1])
    assert command in COMMANDS
    assert {word for word in arguments if word.startswith("--")} <= options(command)
    assert values(dockerfile, "USER")[-1] not in {"root", "0"}
    port = arguments[arguments.index("--port") + 1]
    assert values(dockerfile, "EXPOSE") == [port]
    health = json.loads(values(dockerfile, "HEALTHCHECK")[0].partition("CMD ")[2])
    assert health == ["python", "-m", "dne_serve.health"]
    assert url_of({}) == f"http://127.0.0.1:{port}/healthz"


def test_the_cpu_image_installs_hashed_files_only() -> None:
    first, last = [
        rest for rest in values(DEPLOY / "Dockerfile.cpu", "RUN") if rest.startswith("pip install")
    ]
    assert "--require-hashes --no-deps" in first
    assert "-r image.lock" in first
    assert "--no-build-isolation" in last  # hatchling is in the lock


@by_name
def test_the_base_image_is_given_with_its_digest_or_nothing_is_built(dockerfile: Path) -> None:
    assert values(dockerfile, "FROM") == ["${BASE_IMAGE} AS build", "${BASE_IMAGE}"]
    assert values(dockerfile, "ARG")[:2] == ["BASE_IMAGE", "BASE_IMAGE"]  # without a default
    check = next(rest for rest in values(dockerfile, "RUN") if rest.startswith("case"))
    for image, status in (("python:3.11-slim", 1), (f"python:3.11-slim@sha256:{'0' * 64}", 0)):
        environment = {"BASE_IMAGE": image}
        done = subprocess.run(["sh", "-c", check], env=environment, capture_output=True, text=True)
        assert done.returncode == status
        assert ("has no digest" in done.stderr) is bool(status)


def test_compose_does_not_start_without_a_digest_and_bounds_every_service() -> None:
    for service in compose()["services"].values():
        assert service["build"]["args"]["BASE_IMAGE"].startswith("${BASE_IMAGE:?")
        assert re.fullmatch(r"\$\{DNE_\w+_MEMORY:-\d+g\}", service["mem_limit"])
        assert service["memswap_limit"] == service["mem_limit"]
        assert service["pids_limit"] == 256
        assert [one for one in service["tmpfs"] if ":size=" not in one] == []


def test_compose_builds_from_a_dockerfile_that_exists() -> None:
    for service in compose()["services"].values():
        context = (DEPLOY / service["build"]["context"]).resolve()
        assert context == ROOT
        assert context / service["build"]["dockerfile"] in DOCKERFILES


def test_server_and_trainer_share_one_volume_and_one_store() -> None:
    services = compose()["services"]
    assert set(services) == {"server", "trainer"}
    assert set(compose()["volumes"]) == {"models"}
    for service in services.values():
        assert "models:/models" in service["volumes"]
        assert service["environment"]["DNE_STORE"] == "/models"


def test_the_server_is_reachable_from_this_machine_only_and_needs_a_token() -> None:
    server = compose()["services"]["server"]
    assert [port for port in server["ports"] if not port.startswith("127.0.0.1:")] == []
    assert server["environment"]["DNE_ADMIN_TOKEN"].startswith("${DNE_ADMIN_TOKEN:?")


def test_the_trainer_starts_only_when_asked() -> None:
    assert compose()["services"]["trainer"]["profiles"] == ["train"]
