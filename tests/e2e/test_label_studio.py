"""A team labels in a real Label Studio 1.23: pushed, predicted, annotated, pulled."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from model_store.loop.inbox import Inbox
from model_store.loop.label_studio import model_version
from model_store.store.store import Store
from tests.dne_serve.loop.photos import encoded, photo
from tests.e2e.label_studio import TOKEN, USER, RealLabelStudio, find_command, real_label_studio
from tests.live_server import TOKEN as OURS
from tests.live_server import Live, live_server, wait_for
from tests.trained_store import TrainedStore
from trainer.cli import main as dne_train

PICTURES = 6
LONG_S = 60.0
FOREIGN = "https://example.org/cat.png"
ANNOTATE = """
import json, sys
from label_studio_sdk import LabelStudio
given = json.loads(sys.argv[1])
client = LabelStudio(base_url=given["url"], api_key=given["token"])
made = {}
for number, (result, skipped) in given["results"].items():
    one = client.annotations.create(id=int(number), result=result, was_cancelled=skipped)
    made[number] = one.id
print(json.dumps(made))
"""


@pytest.fixture
def studio(tmp_path: Path) -> Iterator[RealLabelStudio]:
    command = find_command()
    if command is None:
        pytest.skip(
            "LABEL STUDIO WAS NOT TRIED: it is not installed; "
            "`make test SUITE=label-studio` installs it"
        )
    with real_label_studio(command, tmp_path / "label-studio") as studio:
        yield studio


@pytest.fixture
def live(trained_copy: TrainedStore) -> Iterator[Live]:
    """Serves what the real trainer made, and keeps every picture."""
    with live_server(trained_copy.location, collect="sample=100%") as live:
        live.wait_until_ready()
        yield live


def exchange(studio: RealLabelStudio, store: Path, what: str, *options: str) -> dict[str, Any]:
    """Run `dne-train label-studio push` or `pull`, and return its JSON."""
    given = ("--url", studio.url, "--token", TOKEN, "--store", str(store), "--json")
    with redirect_stdout(io.StringIO()) as printed:
        assert dne_train(["label-studio", what, *given, *options]) == 0
    found: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
    return found


def asked(live: Live, route: str) -> int:
    """How often Label Studio itself has called a route, with success."""
    lines = live.http.get("/metrics", headers={"Authorization": f"Bearer {OURS}"}).text.splitlines()
    wanted = [one for one in lines if f'"/label-studio/{route}"' in one and 'status="200"' in one]
    return int(sum(float(one.split()[-1]) for one in wanted if "_total{" in one))


def chosen(name: str) -> list[dict[str, Any]]:
    value = {"choices": [name]}
    return [{"from_name": "class", "to_name": "image", "type": "choices", "value": value}]


def typed(name: str) -> list[dict[str, Any]]:
    value = {"text": [name]}
    return [{"from_name": "new_class", "to_name": "image", "type": "textarea", "value": value}]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_team_labels_in_label_studio(
    studio: RealLabelStudio, live: Live, trained_copy: TrainedStore
) -> None:
    store, inbox = trained_copy.location, Inbox(Store.open(str(trained_copy.location)).objects)
    for seed in range(PICTURES):
        live.predict(encoded(photo(seed), "PNG"))
    bearer = {"Authorization": f"Bearer {OURS}"}
    wait_for(
        lambda: live.http.get("/inbox", headers=bearer).json()["total"] == PICTURES, seconds=LONG_S
    )

    # Push: tasks with predictions, sorted by Label Studio itself; pictures that it shows.
    pushed = exchange(studio, store, "push")
    assert (pushed["created"], pushed["pushed"]) == (True, PICTURES)
    again = exchange(studio, store, "push")
    assert (again["created"], again["pushed"], again["there"]) == (False, 0, PICTURES)
    project = pushed["project"]
    tasks = studio.tasks(project)
    scores = [task["predictions"][0]["score"] for task in tasks]
    assert len(scores) == PICTURES
    assert scores == sorted(scores)
    for task in tasks:
        item = inbox.item(task["data"]["dne_item"])
        (prediction,) = task["predictions"]
        assert prediction["model_version"] == model_version(trained_copy.served)
        assert prediction["result"][0]["value"] == {"choices": [item.top[0].label]}
        assert prediction["score"] == pytest.approx(item.top[0].score)
        assert studio.http.get(task["data"]["image"]).content == inbox.picture(item)
    first = studio.json("GET", f"/api/projects/{project}/next")
    assert first["id"] == tasks[0]["id"], "the most doubtful one comes first"

    # The backend: Label Studio checks health and setup when it is connected.
    backend = {
        "project": project,
        "url": f"{live.url}/label-studio",
        "title": "dne-serve",
        "auth_method": "BASIC_AUTH",
        "basic_auth_user": "dne",
        "basic_auth_pass": "wrong",
    }
    refused = studio.http.post("/api/ml/", json=backend)
    assert refused.status_code == 400, refused.text
    made = studio.json("POST", "/api/ml/", {**backend, "basic_auth_pass": OURS})
    state = studio.json("GET", f"/api/ml/{made['id']}")
    assert state["state"] == "CO", state
    assert (asked(live, "health") > 0, asked(live, "setup") > 0) == (True, True)

    # Another version is served: Label Studio asks for its predictions, also of a foreign image.
    answer = live.admin("/rollback", to=trained_copy.second, reason="to see other predictions")
    assert answer.status_code == 200, answer.text
    classes = tasks[0]["data"]["classes"]
    stranger = {"data": {"image": FOREIGN, "classes": classes}}
    studio.json("POST", f"/api/projects/{project}/import", [stranger])
    studio.json(
        "POST",
        "/api/dm/actions",
        {"selectedItems": {"all": True, "excluded": []}},
        id="retrieve_tasks_predictions",
        project=project,
    )
    assert asked(live, "predict") > 0
    for task in studio.tasks(project):
        versions = {one["model_version"] for one in task["predictions"]}
        old, new = model_version(trained_copy.served), model_version(trained_copy.second)
        assert versions == (set() if task["data"]["image"] == FOREIGN else {old, new})

    # Annotate with Label Studio's own SDK, and pull.
    a, b, c, d, e, f = (task["id"] for task in tasks)
    items = {task["id"]: task["data"]["dne_item"] for task in tasks}
    results = {
        a: (chosen("plus"), False),
        b: (typed("<script>alert(1)<script>"), False),
        c: (chosen("plus"), True),
    }
    studio.run_sdk(ANNOTATE, token=TOKEN, results=results)
    pulled = exchange(studio, store, "pull")
    assert (pulled["labelled"], pulled["cancelled"]) == (2, 1)
    head = inbox.head(items[a])
    assert head is not None
    assert head.label == "plus"
    assert head.actor.startswith(f"label-studio:{USER}#{project}/")
    head = inbox.head(items[b])
    assert head is not None
    assert head.label == "<script>alert(1)<script>"
    assert inbox.head(items[c]) is None
    again = exchange(studio, store, "pull")
    assert (again["labelled"], again["already"]) == (0, 2)
    # A new class is offered to the tasks that wait.
    assert exchange(studio, store, "push")["refreshed"] >= 3
    offered = {
        task["id"]: [one["value"] for one in task["data"]["classes"]]
        for task in studio.tasks(project)
    }
    assert "<script>alert(1)<script>" in offered[d]

    # The webhook that Label Studio made for the backend has no token until somebody gives it one.
    (hook,) = studio.json("GET", "/api/webhooks/", project=project)
    assert hook["url"] == f"{live.url}/label-studio/webhook"
    studio.json("POST", f"/api/tasks/{e}/annotations/", {"result": chosen("plus")})
    assert inbox.head(items[e]) is None
    studio.json("PATCH", f"/api/webhooks/{hook['id']}/", {"headers": bearer})
    told = studio.json("POST", f"/api/tasks/{d}/annotations/", {"result": chosen("plus")})
    wait_for(lambda: inbox.head(items[d]) is not None, seconds=LONG_S)
    studio.json("PATCH", f"/api/annotations/{told['id']}/", {"result": chosen("a")})
    wait_for(
        lambda: [one.label for one in inbox.history(items[d])] == ["plus", "a"], seconds=LONG_S
    )
    skipped = {"result": chosen("plus"), "was_cancelled": True}
    studio.json("POST", f"/api/tasks/{f}/annotations/", skipped)
    last = exchange(studio, store, "pull")
    assert (last["labelled"], last["already"], last["cancelled"]) == (1, 3, 2), last
    studio.json("DELETE", f"/api/annotations/{told['id']}/")
    wait_for(lambda: [one.kind for one in inbox.history(items[d])][2:] == ["clear"], seconds=LONG_S)
    assert inbox.head(items[f]) is None
