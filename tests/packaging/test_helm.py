"""The Helm chart renders the objects of the kustomize files. Nothing is installed here: that
needs a cluster."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
import yaml

from dne_serve.settings import Settings, load_settings
from model_store import __version__
from tests.packaging.kubernetes import (
    FILES,
    VERSIONS,
    Object,
    check_agreement,
    check_pod,
    check_references,
    check_schemas,
    check_server,
    documents,
    everything,
    named,
    pods,
    rendered,
    rendering,
    variables,
    written,
)
from tests.packaging.project import ROOT, tool

CHART = ROOT / "deploy/helm/dne-serve"
KEEP = {"helm.sh/resource-policy": "keep"}
GPU, S3 = ("-f", str(CHART / "values-gpu.yaml")), ("-f", str(CHART / "values-s3.yaml"))
TRAINING = ("--set", "training.deepen.enabled=true", "--set", "training.addTask.name=flowers")
OTHER_VALUES = (
    *("--set", "image.digest=sha256:" + "0" * 64),
    *("--set", "allowedHosts={dne.example.org,*.example.net}"),
    *("--set-string", "env.DNE_SETTLE_SECONDS=10"),
    *("--set", "drainSeconds=30", "--set", "graceSeconds=60"),
    *("--set", "networkPolicy.from[0].namespaceSelector.matchLabels.name=ingress"),
    *("--set", "networkPolicy.egress[0].ports[0].port=8443"),
)
OWN_CLAIM = (
    *("--set", "store.volume.existingClaim=models"),
    *("--set", "serviceAccount.annotations.team=vision"),
    *("--set", "training.cache.storageClass=fast"),
)
OTHER_S3 = ("--set", "store.s3.endpoint=http://s3.example.org:8333", "--set", "store.s3.secret=")
RENDERINGS = {
    "cpu": (),
    "gpu": GPU,
    "s3": S3,
    "training": TRAINING,
    "s3 and training": (*S3, *TRAINING),
    "other values": OTHER_VALUES,
    "own claim": (*OWN_CLAIM, *TRAINING),
    "other S3": (*S3, *OTHER_S3),
}
by_values = pytest.mark.parametrize("values", RENDERINGS.values(), ids=RENDERINGS)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("helm"), *arguments], capture_output=True, text=True)


@cache
def charted(*values: str) -> tuple[Object, ...]:
    done = helm("template", "dne-serve", str(CHART), *values)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_servers(objects: Iterable[Object]) -> tuple[Object, ...]:
    return tuple(
        one for one in objects if one["metadata"]["labels"]["app.kubernetes.io/name"] == "dne-serve"
    )


def in_order(objects: Iterable[Object], *, image: str = "") -> list[Object]:
    """Sort objects, and in them the lists whose order means nothing. Give all pods one image."""
    found = copy.deepcopy(list(objects))
    for one in (mapping for each in found for mapping in everything(each)):
        for field in {"env", "volumes", "volumeMounts"} & one.keys():
            one[field].sort(key=lambda entry: str(entry["name"]))
        if image and isinstance(one.get("image"), str):
            one["image"] = image
    return sorted(found, key=lambda one: (one["kind"], one["metadata"]["name"]))


def without_helms_own(objects: Iterable[Object]) -> tuple[Object, ...]:
    """Undo the three differences to the kustomize files that the chart has on purpose."""
    found = copy.deepcopy(tuple(objects))
    for one in found:
        if one["metadata"]["name"] == "dne-serve-store":
            assert one["metadata"].pop("annotations") == KEEP
        if one["kind"] == "Job":
            assert one["metadata"]["name"] == "dne-train-add-task-flowers"
            one["metadata"]["name"] = "dne-train-add-task"
            assert "ttlSecondsAfterFinished" not in one["spec"]
            one["spec"]["ttlSecondsAfterFinished"] = 86400
    return found


def test_the_chart_passes_helms_own_linter() -> None:
    for values in RENDERINGS.values():
        done = helm("lint", "--strict", str(CHART), *values)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_chart_has_the_version_of_the_project_and_needs_the_kubernetes_of_the_files() -> None:
    (chart,) = documents(CHART / "Chart.yaml")
    assert chart["version"] == chart["appVersion"] == __version__
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"


def test_the_servers_and_the_training_are_those_of_the_kustomize_files() -> None:
    """Compare with the files as they are written, which needs no kubectl."""
    folders = [FILES / "overlays/cpu", FILES / "training"]
    expected = [one for folder in folders for one in written(folder)]
    assert len(expected) == 12
    found = without_helms_own(charted(*TRAINING))
    assert in_order(found, image="any") == in_order(expected, image="any")
    assert in_order(charted()) == in_order(of_servers(charted(*TRAINING)))  # training is an option


@rendering
@pytest.mark.parametrize(
    ("values", "folder", "training"),
    [
        (TRAINING, "overlays/cpu", "training"),
        (GPU, "overlays/gpu", None),
        ((*S3, *TRAINING), "overlays/s3", "overlays/s3/training"),
    ],
    ids=["cpu", "gpu", "s3"],
)
def test_every_overlay_has_its_values(
    values: tuple[str, ...], folder: str, training: str | None
) -> None:
    expected = [*rendered(FILES / folder), *(rendered(FILES / training) if training else ())]
    assert in_order(without_helms_own(charted(*values))) == in_order(expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda pod: pod["containers"][0]["readinessProbe"].update(periodSeconds=6),
        lambda pod: pod["containers"][0]["securityContext"].pop("readOnlyRootFilesystem"),
        lambda pod: pod["containers"][0]["env"].append({"name": "DNE_NEW", "value": "1"}),
        lambda pod: pod.update(terminationGracePeriodSeconds=41),
    ],
    ids=["probe", "security context", "variable", "drain"],
)
def test_a_change_of_the_kustomize_files_is_noticed(change: Callable[[Object], object]) -> None:
    own = [one for one in charted() if one["kind"] != "PersistentVolumeClaim"]
    base = copy.deepcopy(written(FILES / "base"))
    assert in_order(own, image="any") == in_order(base, image="any")
    change(pods(base)[0])
    assert in_order(own, image="any") != in_order(base, image="any")


@by_values
def test_every_rendering_keeps_the_promises_of_the_files(values: tuple[str, ...]) -> None:
    objects = charted(*values)
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(names)) == len(names)
    assert "Secret" not in {kind for kind, _ in names}
    for pod in pods(objects):
        check_pod(pod)
        check_references(pod)
    check_server(pods(of_servers(objects))[0])
    without_claim = [one for one in of_servers(objects) if one["kind"] != "PersistentVolumeClaim"]
    check_agreement(without_claim)


@by_values
def test_the_server_takes_the_value_of_every_variable(values: tuple[str, ...]) -> None:
    (pod,) = pods(of_servers(charted(*values)))
    given = variables(pod["containers"][0]) | {"DNE_THREADS": "2"}  # Kubernetes takes it of limits
    fields = {f"DNE_{name.upper()}": name for name in Settings.model_fields}
    settings = load_settings(**{fields[name]: given[name] for name in fields if name in given})
    assert settings.drain_seconds > 0
    assert settings.token_file is not None


def test_values_reach_their_objects() -> None:
    objects = charted(*OTHER_VALUES)
    (pod,) = pods(objects)
    (container,) = pod["containers"]
    assert container["image"] == "registry.example.org/dne-serve@sha256:" + "0" * 64
    assert pod["terminationGracePeriodSeconds"] == 30 + 60 + 15
    given = variables(container)
    assert given["DNE_ALLOWED_HOSTS"].endswith(".svc.cluster.local,dne.example.org,*.example.net")
    assert given["DNE_SETTLE_SECONDS"] == "10"
    policy = named(objects, "NetworkPolicy")["spec"]
    assert policy["ingress"][0]["from"][1] == {
        "namespaceSelector": {"matchLabels": {"name": "ingress"}}
    }
    assert policy["egress"] == [{"ports": [{"port": 8443}]}]


def test_a_claim_of_ones_own_is_mounted_and_none_is_made() -> None:
    objects = charted(*OWN_CLAIM, *TRAINING)
    (made,) = (one for one in objects if one["kind"] == "PersistentVolumeClaim")
    assert made["metadata"]["name"] == "dne-train-cache"
    assert made["spec"]["storageClassName"] == "fast"
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pods(objects)
        for volume in pod["volumes"]
        if volume["name"] == "store"
    ]
    assert claims == ["models"] * 3
    account = named(of_servers(objects), "ServiceAccount")
    assert account["metadata"]["annotations"] == {"team": "vision"}


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("", 443),
        ("https://s3.example.org", 443),
        ("http://s3.example.org/", 80),
        ("http://s3.example.org:8333", 8333),
    ],
)
def test_the_port_of_the_endpoint_is_let_out(endpoint: str, port: int) -> None:
    objects = charted(*S3, "--set", "store.s3.secret=", "--set", f"store.s3.endpoint={endpoint}")
    _, storage = named(objects, "NetworkPolicy")["spec"]["egress"]
    assert storage["ports"] == [{"protocol": "TCP", "port": port}]
    (pod,) = pods(objects)
    given = variables(pod["containers"][0])
    assert given.get("AWS_ENDPOINT_URL", "") == endpoint
    assert "AWS_ACCESS_KEY_ID" not in given  # the role of the ServiceAccount


@pytest.mark.parametrize("gibibytes", [1, 7, 10, 1000])
def test_the_shards_in_the_cache_fit_its_volume(gibibytes: int) -> None:
    (pod,) = pods(charted(*S3, "--set", f"store.s3.cacheGiB={gibibytes}"))
    (volume,) = (one for one in pod["volumes"] if one["name"] == "cache")
    assert volume["emptyDir"]["sizeLimit"] == f"{gibibytes}Gi"
    bound = int(variables(pod["containers"][0])["DNE_CACHE_BYTES"])
    assert bound == (gibibytes << 30) * 8 // 10


def test_the_readme_tells_how_to_install_each_set_of_values() -> None:
    readme = (FILES / "README.md").read_text()
    assert "helm install dne-serve deploy/helm/dne-serve" in readme
    for path in CHART.glob("values-*.yaml"):
        assert f"-f deploy/helm/dne-serve/{path.name}" in readme


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_rendered_fits_the_schemas_of_kubernetes(version: str, tmp_path: Path) -> None:
    objects = [one for values in RENDERINGS.values() for one in charted(*values)]
    different = {json.dumps(one, sort_keys=True): one for one in objects}
    assert check_schemas(different.values(), version=version, folder=tmp_path) > 20
