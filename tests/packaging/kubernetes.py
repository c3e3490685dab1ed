"""Read and render the Kubernetes files, and check what pods and the objects around them promise."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.project import ROOT, tool

Object = dict[str, Any]

FILES = ROOT / "deploy" / "kubernetes"
KUSTOMIZATIONS = sorted(path.parent for path in FILES.rglob("kustomization.yaml"))
SERVERS = [FILES / "overlays" / name for name in ("cpu", "gpu", "s3")]
VERSIONS = ("1.29", "1.32", "1.37")
"""Kubernetes versions: the oldest one whose schemas fit, one between, and the newest one."""
KUBECTL = shutil.which("kubectl")
MINIMAL_POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "made-here"}}

rendering = pytest.mark.skipif(
    KUBECTL is None, reason="THE KUSTOMIZATIONS WERE NOT RENDERED: kubectl is not installed"
)


def place(path: Path) -> str:
    return str(path.relative_to(FILES))


@cache
def documents(path: Path) -> tuple[Any, ...]:
    return tuple(yaml.safe_load_all(path.read_text()))


def kustomization(folder: Path) -> Object:
    (loaded,) = documents(folder / "kustomization.yaml")
    assert isinstance(loaded, dict)
    return loaded


def written(folder: Path) -> list[Object]:
    """Collect the objects of a kustomization and of its bases, without its patches."""
    bases = [(folder / base).resolve() for base in kustomization(folder).get("bases", [])]
    paths = [folder / name for name in kustomization(folder).get("resources", [])]
    return [one for base in bases for one in written(base)] + [
        one for path in paths for one in documents(path)
    ]


@cache
def rendered(folder: Path) -> tuple[Object, ...]:
    assert KUBECTL is not None
    done = subprocess.run([KUBECTL, "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def named(objects: list[Object] | tuple[Object, ...], kind: str) -> Object:
    (found,) = (one for one in objects if one["kind"] == kind)
    return found


def pod_spec(one: Object) -> Object | None:
    """Return the part of an object that describes its pods."""
    spec: Any = one.get("spec", {})
    if one["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    if one["kind"] in {"Deployment", "Job", "CronJob"}:
        spec = spec["template"]["spec"]
        assert isinstance(spec, dict)
        return spec
    return None


def served_by_kserve(objects: list[Object] | tuple[Object, ...]) -> Object:
    """Put a pod together as KServe does: containers and volumes of the runtime, the rest of the
    predictor."""
    runtime = named(objects, "ServingRuntime")["spec"]
    predictor = named(objects, "InferenceService")["spec"]["predictor"]
    own = {"model", "minReplicas", "maxReplicas", "scaleMetric", "scaleTarget"}
    of_pod = {name: value for name, value in predictor.items() if name not in own}
    return {**of_pod, "containers": runtime["containers"], "volumes": runtime["volumes"]}


def pods(objects: list[Object] | tuple[Object, ...]) -> list[Object]:
    found = [spec for one in objects if (spec := pod_spec(one)) is not None]
    kserve = any(one["kind"] == "ServingRuntime" for one in objects)
    return [*found, served_by_kserve(objects)] if kserve else found


def everything(value: Any) -> Iterator[Object]:
    """Walk through every mapping in a document, that of a patch too."""
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        yield from everything(one)


def variables(container: Object) -> dict[str, str]:
    return {one["name"]: str(one.get("value", "")) for one in container["env"]}


def check_pod(pod: Object) -> None:
    """Check that a pod runs without privileges and within limits."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["fsGroup"] == 10001
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    writable = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for bound in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container["resources"][bound])
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) == writable  # a volume that nobody mounts is a slip
        assert {variables(container)["DNE_CACHE"], variables(container)["HOME"]} <= set(mounts)
        assert "/tmp" in mounts


def check_server(pod: Object) -> None:
    """Check probes, draining and tokens of a server."""
    (container,) = pod["containers"]
    given = variables(container)
    (port,) = container["ports"]
    assert str(port["containerPort"]) == given["DNE_PORT"]
    routes = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    for probe, route in routes.items():
        asked = container[probe]["httpGet"]
        assert asked["path"] == route
        assert asked["port"] in {port.get("name"), port["containerPort"]}
    drain_s, grace_s = float(given["DNE_DRAIN_SECONDS"]), float(given["DNE_GRACE_SECONDS"])
    assert drain_s > 0
    assert pod["terminationGracePeriodSeconds"] > drain_s + grace_s
    (tokens,) = (mount for mount in container["volumeMounts"] if mount["name"] == "tokens")
    for name in ("DNE_ADMIN_TOKEN_FILE", "DNE_TOKEN_FILE"):
        assert Path(given[name]).parent == Path(tokens["mountPath"])
    assert "DNE_ALLOW_OPEN" not in given


def check_agreement(objects: list[Object] | tuple[Object, ...]) -> None:
    """Check that the objects around a Deployment mean its pods."""
    deployment = named(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    service, policy = named(objects, "Service"), named(objects, "NetworkPolicy")
    budget, scaler = (
        named(objects, "PodDisruptionBudget"),
        named(objects, "HorizontalPodAutoscaler"),
    )
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels
    target = scaler["spec"]["scaleTargetRef"]
    assert [target["kind"], target["name"]] == ["Deployment", deployment["metadata"]["name"]]
    assert "replicas" not in deployment["spec"]  # the autoscaler's
    assert 2 <= scaler["spec"]["minReplicas"] <= scaler["spec"]["maxReplicas"]
    assert budget["spec"]["maxUnavailable"] < scaler["spec"]["minReplicas"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == named(objects, "ServiceAccount")["metadata"]["name"]
    ports = {port["name"] for port in pod["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    allowed = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    assert set(allowed) <= ports
    hosts = variables(pod["containers"][0])["DNE_ALLOWED_HOSTS"].split(",")
    assert service["metadata"]["name"] in hosts


def check_references(pod: Object) -> None:
    """Check that each $(NAME) is a variable that stands before it: others stay as they are."""
    for container in pod["containers"]:
        known: set[str] = set()
        for one in container["env"]:
            assert set(re.findall(r"\$\((\w+)\)", str(one.get("value", "")))) <= known
            known.add(one["name"])
        assert len(known) == len(container["env"])
        asked = re.findall(r"\$\((\w+)\)", " ".join(container.get("args", [])))
        assert set(asked) <= known


def known_objects(folder: Path) -> list[Object]:
    """The rendered objects that Kubernetes has schemas of. KServe's are not among them, the pods
    inside them are."""
    objects = rendered(folder)
    own = [one for one in objects if not one["apiVersion"].startswith("serving.kserve.io/")]
    if len(own) < len(objects):
        own.append({**MINIMAL_POD, "spec": served_by_kserve(objects)})
    return own


def check_schemas(objects: Iterable[Object], *, version: str, folder: Path) -> int:
    """Check that a version of Kubernetes would take every object, and return their number."""
    command = [tool("kubernetes-validate"), "--strict", "--kubernetes-version", version]
    files = []
    for number, one in enumerate(objects):
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(yaml.safe_dump(one))
    done = subprocess.run([*command, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    broken = folder / "broken.yaml"
    broken.write_text(yaml.safe_dump({**MINIMAL_POD, "spec": {"container": []}}))
    assert subprocess.run([*command, broken], capture_output=True).returncode != 0
    return len(files)
