"""The Kubernetes files name what exists and agree with each other. Nothing is applied here: that
needs a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dne_serve.settings import Settings, load_settings
from tests.packaging.kubernetes import (
    FILES,
    KUSTOMIZATIONS,
    SERVERS,
    VERSIONS,
    check_agreement,
    check_pod,
    check_references,
    check_schemas,
    check_server,
    documents,
    everything,
    known_objects,
    kustomization,
    named,
    place,
    pod_spec,
    pods,
    rendered,
    rendering,
    variables,
    written,
)
from tests.packaging.project import ROOT, sources
from trainer.cli import build_parser

PLACEHOLDER = re.compile(r"dne-serve:set-by-\w+-\w+")
AWS = re.compile(r"`(AWS_[A-Z_]+)`")

by_kustomization = pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=place)


def variables_of_the_code() -> dict[str, set[str]]:
    """Find the DNE_ variables of each command."""
    reads = {
        package: {
            name
            for path in sources()
            if path.relative_to(ROOT).parts[0] == package
            for name in re.findall(r"environ(?:\.get\(|\[)\"(DNE_[A-Z_]+)\"", path.read_text())
        }
        for package in ("model_store", "trainer")
    }
    settings = {f"DNE_{name.upper()}" for name in Settings.model_fields}
    return {
        "dne-serve": settings | reads["model_store"],
        "dne-train": reads["trainer"] | reads["model_store"],
    }


def test_every_file_is_part_of_a_kustomization() -> None:
    named_files = {folder / "kustomization.yaml" for folder in KUSTOMIZATIONS}
    for folder in KUSTOMIZATIONS:
        given = kustomization(folder)
        patches = [one["path"] for one in given.get("patchesJson6902", [])]
        names = [*given.get("resources", []), *given.get("patchesStrategicMerge", []), *patches]
        named_files |= {folder / name for name in names}
    assert set(FILES.rglob("*.yaml")) == named_files
    assert {place(folder) for folder in KUSTOMIZATIONS} == {
        "base", "kserve", "overlays/cpu", "overlays/gpu", "overlays/s3", "overlays/s3/training",
        "training",
    }  # fmt: skip


@by_kustomization
def test_a_kustomization_has_only_fields_that_kubectl_1_20_knows(folder: Path) -> None:
    known = {"apiVersion", "kind", "bases", "resources", "images"}
    assert set(kustomization(folder)) <= known | {"patchesStrategicMerge", "patchesJson6902"}
    for name in kustomization(folder).get("resources", []):
        assert (folder / name).is_file()  # a folder among the resources is an error there
    for base in kustomization(folder).get("bases", []):
        assert (folder / base / "kustomization.yaml").is_file()


@by_kustomization
def test_a_patch_changes_an_object_that_exists(folder: Path) -> None:
    given = kustomization(folder)
    there = {(one["kind"], one["metadata"]["name"]) for one in written(folder)}
    patches = [
        one for name in given.get("patchesStrategicMerge", []) for one in documents(folder / name)
    ]
    changed = {(one["kind"], one["metadata"]["name"]) for one in patches}
    changed |= {
        (one["target"]["kind"], one["target"]["name"]) for one in given.get("patchesJson6902", [])
    }
    assert changed <= there
    # kubectl 1.20 merges lists by name only in kinds that it knows.
    lists = {one["kind"] for one in patches if pod_spec(one) is not None}
    assert lists <= {"Deployment", "Job"}


@by_kustomization
def test_every_pod_runs_without_privileges_and_within_limits(folder: Path) -> None:
    found = pods(written(folder))
    assert found
    for pod in found:
        check_pod(pod)
        check_references(pod)


@pytest.mark.parametrize("folder", [*SERVERS, FILES / "base", FILES / "kserve"], ids=place)
def test_every_server_has_probes_time_to_drain_and_tokens(folder: Path) -> None:
    (pod,) = pods(written(folder))
    check_server(pod)


@pytest.mark.parametrize("folder", [*SERVERS, FILES / "base"], ids=place)
def test_names_and_selectors_agree(folder: Path) -> None:
    check_agreement(written(folder))


def test_the_routes_of_the_probes_are_served() -> None:
    from dne_serve.http.routes import health

    assert {"/healthz", "/readyz"} <= {getattr(route, "path", "") for route in health.routes}


def test_every_variable_is_one_that_the_command_reads() -> None:
    known = variables_of_the_code()
    documented = set(AWS.findall((ROOT / "docs/object-storage.md").read_text()))
    seen = set()
    for path in FILES.rglob("*.yaml"):
        command = "dne-train" if "training" in path.parts else "dne-serve"
        for one in everything(list(documents(path))):
            name = str(one.get("name", ""))
            if name.startswith("DNE_") and ("value" in one or "valueFrom" in one):
                assert name in known[command], f"{place(path)}: {name}"
                seen.add(name)
            if name.startswith("AWS_"):
                assert name in documented, f"{place(path)}: {name}"
                seen.add(name)
    assert len(seen) > 15


@pytest.mark.parametrize("folder", [*SERVERS, FILES / "kserve"], ids=place)
def test_the_server_takes_every_value(folder: Path) -> None:
    (pod,) = pods(written(folder))
    patches = [one for path in folder.glob("*.yaml") for one in everything(list(documents(path)))]
    given = variables(pod["containers"][0])
    given |= {
        one["name"]: str(one["value"])
        for one in patches
        if str(one.get("name", "")).startswith("DNE_") and "value" in one
    }
    given["DNE_THREADS"] = "2"  # as Kubernetes takes it from the limit
    given["DNE_MODEL_NAME"] = given.get("DNE_MODEL_NAME", "dne").replace("{{.Name}}", "dne")
    fields = {f"DNE_{name.upper()}": name for name in Settings.model_fields}
    settings = load_settings(**{fields[name]: given[name] for name in fields if name in given})
    assert settings.host == "0.0.0.0"
    assert settings.drain_seconds > 0
    assert settings.token_file is not None


def test_the_trainer_takes_every_option() -> None:
    found = pods(written(FILES / "training"))
    commands = set()
    for pod in found:
        (container,) = pod["containers"]
        assert container["command"] == ["dne-train"]
        assert ("--if-needed" in container["args"]) is (container["args"][0] == "deepen")
        arguments = [word.replace("$(CPU_LIMIT)", "4") for word in container["args"]]
        asked = build_parser().parse_args(arguments)
        commands.add(arguments[0])
        assert asked.threads == 4
        mounts = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
        data = getattr(asked, "data", None)
        assert data is None or mounts & set(data.parents)
    assert commands == {"add-task", "deepen"}


def test_a_training_that_would_end_alike_is_not_tried_again() -> None:
    from model_store.cli.command import EXIT_NOT_PROMOTED

    objects = written(FILES / "training")
    cron = named(objects, "CronJob")["spec"]
    assert cron["concurrencyPolicy"] == "Forbid"
    for job in (named(objects, "Job")["spec"], cron["jobTemplate"]["spec"]):
        assert job["template"]["spec"]["restartPolicy"] == "Never"
        first = job["podFailurePolicy"]["rules"][0]
        assert first["action"] == "FailJob"
        assert first["onExitCodes"]["values"] == [2, EXIT_NOT_PROMOTED]
        policy = named(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
        assert job["template"]["metadata"]["labels"] == policy


def test_secrets_are_named_and_never_contained() -> None:
    readme = (FILES / "README.md").read_text()
    for path in FILES.rglob("*.yaml"):
        for one in everything(list(documents(path))):
            assert one.get("kind") != "Secret"
            assert "secretGenerator" not in one
            name = str(one.get("name", ""))
            if re.search(r"TOKEN$|SECRET|ACCESS_KEY|PASSWORD", name):
                assert "secretKeyRef" in one["valueFrom"], f"{place(path)}: {name}"
            secret = one.get("secretName") or one.get("secretKeyRef", {}).get("name")
            if secret:
                assert f"kubectl create secret generic {secret} " in readme
            if key := one.get("secretKeyRef", {}).get("key"):
                assert f"--from-literal={key}=" in readme
    (pod,) = pods(written(FILES / "base"))
    for name in ("DNE_ADMIN_TOKEN_FILE", "DNE_TOKEN_FILE"):
        key = Path(variables(pod["containers"][0])[name]).name
        assert re.search(rf"--from-(literal|file)={key}=", readme)


def test_images_are_placeholders_that_a_kustomization_replaces() -> None:
    for path in FILES.rglob("*.yaml"):
        assert "latest" not in path.read_text()
        for one in everything(list(documents(path))):
            if isinstance(image := one.get("image"), str):
                assert PLACEHOLDER.fullmatch(image), f"{place(path)}: {image}"
    for folder in KUSTOMIZATIONS:
        images = kustomization(folder).get("images", [])
        inherited = folder in {FILES / "base", FILES / "overlays/s3/training"}
        assert len(images) == (0 if inherited else 1)
        for image in images:
            assert image.get("newTag") or image.get("digest")


def test_both_overlays_with_a_volume_claim_the_same_store() -> None:
    cpu, gpu = (documents(FILES / "overlays" / name / "store.yaml") for name in ("cpu", "gpu"))
    assert cpu == gpu
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for folder in ("base", "training", "kserve")
        for pod in pods(written(FILES / folder))
        for volume in pod["volumes"]
        if volume["name"] == "store"
    }
    assert claims == {cpu[0]["metadata"]["name"]}
    assert cpu[0]["spec"]["accessModes"] == ["ReadWriteMany"]  # servers on several nodes


def test_the_cache_of_object_storage_fits_its_volume() -> None:
    patch = documents(FILES / "overlays/s3/s3.yaml")[0]["spec"]["template"]["spec"]
    (cache_volume,) = (volume for volume in patch["volumes"] if volume["name"] == "cache")
    size = cache_volume["emptyDir"]["sizeLimit"]
    assert size.endswith("Gi")
    assert int(variables(patch["containers"][0])["DNE_CACHE_BYTES"]) < int(size[:-2]) << 30


def test_the_kserve_service_uses_the_runtime_and_its_protocol() -> None:
    objects = written(FILES / "kserve")
    runtime, service = named(objects, "ServingRuntime"), named(objects, "InferenceService")
    model = service["spec"]["predictor"]["model"]
    formats = [(one["name"], one["version"]) for one in runtime["spec"]["supportedModelFormats"]]
    assert (model["modelFormat"]["name"], model["modelFormat"]["version"]) in formats
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    (container,) = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"
    assert variables(container)["DNE_MODEL_NAME"] == "{{.Name}}"


def test_the_readme_tells_how_to_apply_each_kustomization_and_which_versions_fit() -> None:
    readme = (FILES / "README.md").read_text()
    applied = [folder for folder in KUSTOMIZATIONS if folder.name != "base"]
    assert [one for one in applied if f"-k deploy/kubernetes/{place(one)}\n" not in readme] == []
    for version in VERSIONS:
        assert version in readme


@rendering
@by_kustomization
def test_what_is_rendered_keeps_every_promise(folder: Path) -> None:
    objects = rendered(folder)
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(names)) == len(names) == len(written(folder))
    for pod in pods(objects):
        check_pod(pod)
        check_references(pod)
        (image,) = {container["image"] for container in pod["containers"]}
        if folder.name != "base":
            assert re.fullmatch(r"registry\.example\.org/dne-serve(:[\w-]+|@sha256:\w+)", image)
    if folder in SERVERS:
        check_server(pods(objects)[0])
        check_agreement(objects)


@rendering
@pytest.mark.parametrize("folder", ["overlays/s3", "overlays/s3/training"])
def test_on_object_storage_no_pod_mounts_a_volume_for_the_store(folder: str) -> None:
    found = pods(rendered(FILES / folder))
    assert found
    for pod in found:
        assert [volume for volume in pod["volumes"] if volume["name"] == "store"] == []
        (container,) = pod["containers"]
        assert variables(container)["DNE_STORE"].startswith("s3://")
        assert {"AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(
            variables(container)
        )


@rendering
def test_on_a_gpu_the_pod_asks_for_one() -> None:
    (pod,) = pods(rendered(FILES / "overlays/gpu"))
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert variables(container)["DNE_DEVICE"] == "cuda"


@rendering
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_rendered_fits_the_schemas_of_kubernetes(version: str, tmp_path: Path) -> None:
    objects = [one for folder in KUSTOMIZATIONS for one in known_objects(folder)]
    assert check_schemas(objects, version=version, folder=tmp_path) > 20
