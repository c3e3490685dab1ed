"""Every route that reads or predicts, for every version that the real commands made."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import httpx
import pytest

from dne_serve.engines.base import Engine
from dne_serve.engines.onnx_engine import OnnxEngine
from dne_serve.engines.torch_engine import TorchEngine
from model_store.cli.main import main as dne_store
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.protocol_v2.triton import connected, image_input
from tests.live_server import TOKEN, Live, live_server, wait_for
from tests.openapi_answers import Document, Operation
from tests.trained_store import NEW_NAME, RENAMED, RETIRED, TrainedStore

MODEL = "dne"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A server on a store that the real commands made."""

    live: Live
    document: Document
    store: Store

    @property
    def versions(self) -> list[int]:
        return self.store.versions()

    @property
    def served(self) -> Manifest:
        head = self.store.head("production")
        assert head is not None
        return self.store.manifest(head.target)

    def ask(self, operation: Operation, **others: object) -> httpx.Response:
        """An operation with `others` in its path, for the model that is served."""
        path = operation.path.format(model=MODEL, **others)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        query = {"label": self.served.classes[0]} if operation.needs("label") else {}
        return self.live.http.request(operation.method, path, headers=headers, params=query)

    def expected(self, operation: Operation, version: int) -> int:
        """No region of shared memory, item of the inbox or job is there. Some versions show no
        picture. A version is ready while it is in memory."""
        if {"region", "item", "job"} & set(operation.parameters("path")):
            return 404
        if (
            "image" in operation.parameters("path")
            and not self.store.manifest(version).metrics.shown
        ):
            return 404
        in_memory = [one.version for one in self.live.serving.loaded.manifests]
        asks_memory = operation.path.endswith("/versions/{version}/ready")
        return 404 if asks_memory and version not in in_memory else 200

    def infer(self, version: int, *images: bytes) -> httpx.Response:
        data = [base64.b64encode(image).decode() for image in images]
        tensor = {"name": "image", "datatype": "BYTES", "shape": [len(images)], "data": data}
        path = f"/v2/models/{MODEL}/versions/{version}/infer"
        return self.live.http.post(path, json={"inputs": [tensor]})


def engine_of(backend: str) -> Engine:
    made: dict[str, type[TorchEngine] | type[OnnxEngine]] = {
        "torch": TorchEngine,
        "onnx": OnnxEngine,
    }
    return made[backend](device="cpu", threads=1)


@pytest.fixture(
    scope="module",
    params=list(product(["tiny", "pretrained"], ["torch", "onnx"])),
    ids=" on ".join,
)
def trained(request: pytest.FixtureRequest, trained_store: TrainedStore) -> Iterator[Trained]:
    """One server for all tests of this file: none may change its store."""
    which, backend = request.param
    location = trained_store.location if which == "tiny" else trained_store.pretrained
    with live_server(location, engine=engine_of(backend)) as live:
        live.wait_until_ready()
        store = Store.open(str(location))
        yield Trained(live=live, document=Document(live.http), store=store)


def test_every_read_operation_answers_for_every_version_as_its_schema_says(
    trained: Trained,
) -> None:
    asked = 0
    for operation in trained.document.operations("get"):
        for version in trained.versions if "version" in operation.parameters("path") else [0]:
            others = {"region": "none", "item": "none", "job": "none", "image": 0}
            answer = trained.ask(operation, version=version, **others)
            assert answer.status_code == trained.expected(operation, version), answer.text
            trained.document.check(operation, answer)
            asked += 1
    assert asked > 10 + 5 * len(trained.versions)


def test_the_classes_of_every_version_are_told(trained: Trained) -> None:
    operation = trained.document.operation("get", "/classes")
    for version in trained.versions:
        answer = trained.live.http.get("/classes", params={"version": version})
        trained.document.check(operation, answer)
        told = [one["label"] for one in answer.json()["classes"]]
        assert told == list(trained.store.manifest(version).classes)


def test_the_route_of_a_version_says_what_the_command_says(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in trained.versions:
        told = trained.live.http.get(f"/versions/{version}").json()
        assert dne_store(["show", str(version), "--json", "--store", trained.store.location]) == 0
        shown = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert {name: told[name] for name in shown} == shown


def test_every_version_predicts_over_both_interfaces_alike(
    trained: Trained, trained_store: TrainedStore
) -> None:
    images = [trained_store.image(name) for name in ("a", RENAMED, "0")]
    predict = trained.document.operation("post", "/predict")
    infer = trained.document.operation("post", "/v2/models/{model}/versions/{version}/infer")
    for version in trained.versions:
        answer = trained.live.predict(*images, query=f"?version={version}")
        trained.document.check(predict, answer)
        assert answer.json()["version"] == version
        inferred = trained.infer(version, *images)
        trained.document.check(infer, inferred)
        outputs = {one["name"]: one["data"] for one in inferred.json()["outputs"]}
        assert outputs["label"] == [one["label"] for one in answer.json()["predictions"]]
        assert set(outputs["label"]) <= set(trained.store.manifest(version).classes)


def test_images_of_the_learnt_classes_are_recognised(
    trained: Trained, trained_store: TrainedStore
) -> None:
    """By the served version, which answers by the new name and never with a retired class."""
    names = list(trained.served.classes)
    images = [trained_store.image(RENAMED if name == NEW_NAME else name) for name in names]
    found = trained.live.predict(*images).json()["predictions"]
    assert [one["label"] for one in found] == names
    [retired] = trained.live.predict(trained_store.image(RETIRED)).json()["predictions"]
    assert retired["label"] in names


def test_a_version_that_is_not_there_is_404_everywhere(trained: Trained) -> None:
    missing = trained.versions[-1] + 1
    for operation in trained.document.operations("get"):
        if "version" in operation.parameters("path"):
            answer = trained.ask(operation, version=missing, image=0)
            assert answer.status_code == 404, answer.text
            trained.document.check(operation, answer)


def test_an_outside_client_asks_every_version(
    trained: Trained, trained_store: TrainedStore
) -> None:
    images = [trained_store.image(name) for name in ("a", RENAMED)]
    with connected(trained.live) as client:
        for version in map(str, trained.versions):
            classes = trained.store.manifest(int(version)).classes
            assert client.get_model_metadata(MODEL, version)["outputs"]
            labels = client.get_model_config(MODEL, version)["parameters"]["labels"]
            assert json.loads(labels["string_value"]) == list(classes)
            answer = client.infer(MODEL, [image_input(*images)], version)
            assert client.is_model_ready(MODEL, version)  # by now it is in memory
            assert answer.as_numpy("probabilities").shape == (len(images), len(classes))
            assert answer.as_numpy("probabilities").sum(axis=1) == pytest.approx(1)


def test_the_channel_moves_over_http_to_every_kind_of_version(trained_copy: TrainedStore) -> None:
    with live_server(trained_copy.location) as live:
        live.wait_until_ready()
        document = Document(live.http)
        for version in trained_copy.versions:
            answer = live.admin("/promote", to=version, reason="to see whether it goes")
            document.check(document.operation("post", "/promote"), answer)
            assert answer.json()["version"] == version
            assert live.predict(trained_copy.image("a")).json()["version"] == version
        for path, expected in (
            ("/rollback", trained_copy.retirement),
            ("/resume", trained_copy.branch),
        ):
            answer = live.admin(path, reason="")
            document.check(document.operation("post", path), answer)
            assert answer.json()["version"] == expected


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_a_branch_and_a_refused_version_stand_beside_the_served_one(
    trained_store: TrainedStore, backend: str
) -> None:
    canary = f"{trained_store.branch}=50%,shadow={trained_store.refused}"
    beside = ("canary", "shadow")
    with live_server(trained_store.location, engine=engine_of(backend), canary=canary) as live:
        live.wait_until_ready()
        wait_for(lambda: None not in map(live.http.get("/readyz").json().get, beside))
        answers = [live.predict(trained_store.image("a")).json() for _ in range(20)]
    assert {one["version"] for one in answers} == {trained_store.branch, trained_store.served}
    assert {one["predictions"][0]["label"] for one in answers} == {"a"}
