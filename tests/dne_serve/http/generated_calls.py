"""Call every operation of a server by a generated client: run in the generator's environment.

python generated_calls.py FOLDER URL TOKEN IMAGE VERSION prints the status of each operation.
FOLDER has the generated package `client`. Only what the generator itself needs is imported.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import io
import json
import pkgutil
import sys
import time
from pathlib import Path
from typing import Any

FIRST = ("predict_predict_post", "label_item_inbox_item_label_post", "ask_for_job_jobs_post")
"""Make the item and the job that other operations ask for."""
LAST = (
    "cancel_job_jobs_job_cancel_post",
    "delete_item_inbox_item_delete",
    "promote_promote_post",
    "rollback_rollback_post",
    "resume_resume_post",
    "load_v2_repository_models_model_load_post",
    "unload_v2_repository_models_model_unload_post",
)
"""Take those away again, or move what is served."""
LABEL_CONFIG = (
    '<View><Image name="image" value="$image"/>'
    '<Choices name="class" toName="image" value="$classes"/></View>'
)


def main(folder: str, url: str, token: str, image: str, version: str) -> None:
    sys.path.insert(0, folder)
    models, types = (importlib.import_module(f"client.{name}") for name in ("models", "types"))
    made = importlib.import_module("client").AuthenticatedClient(base_url=url, token=token)
    picture = Path(image).read_bytes()
    known: dict[str, Any] = {"model": "dne", "version": version, "region": "none", "image": 0}
    statuses = {}
    operations = found_operations()
    assert {*FIRST, *LAST} <= operations.keys()
    middle = [name for name in operations if name not in FIRST + LAST]
    for name in (*FIRST, *middle, *LAST):
        body = body_of(name, models=models, types=types, picture=picture, known=known)
        parameters = inspect.signature(operations[name]).parameters
        if not body and "None" in str(parameters.get("body", "")):
            body = {"body": None}  # the generator's own code cannot leave such a body out
        given = {one: known[one] for one in parameters if one in known}
        if name == FIRST[0]:
            given = {"keep": True, "version": int(version)}
        answer = operations[name](client=made, **given, **body)
        statuses[name] = answer.status_code
        if name == FIRST[0]:
            known["item"] = answer.parsed.predictions[0].id
            known["label"] = answer.parsed.predictions[0].label
            wait_until_kept(operations["show_item_inbox_item_get"], known["item"], client=made)
        assert name not in FIRST or answer.status_code < 300, answer
        if name == FIRST[2]:
            known["job"] = answer.parsed.id
    print(json.dumps(statuses))


def wait_until_kept(show: Any, item: str, *, client: Any) -> None:
    """Wait for the item of an answer, which is kept in the background."""
    ends = time.monotonic() + 60
    while show(item, client=client).status_code != 200:
        assert time.monotonic() < ends, f"item {item} was not kept"
        time.sleep(0.1)


def found_operations() -> dict[str, Any]:
    api = importlib.import_module("client.api")
    modules = [
        importlib.import_module(one.name)
        for one in pkgutil.walk_packages(api.__path__, "client.api.")
        if not one.ispkg
    ]
    return {one.__name__.rpartition(".")[2]: one.sync_detailed for one in modules}


def body_of(
    name: str, *, models: Any, types: Any, picture: bytes, known: dict[str, Any]
) -> dict[str, Any]:
    """Make the body of an operation that needs one."""
    if name == "predict_predict_post":
        file = types.File(payload=io.BytesIO(picture), file_name="a.png", mime_type="image/png")
        return {"body": models.PredictPredictPostFilesBody(files=[file])}
    if name.startswith("infer"):
        data = [base64.b64encode(picture).decode()]
        tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": data}
        kinds = [one for one in vars(models) if one.lower().startswith(name.replace("_", ""))]
        kind = min(kinds, key=len)  # its parts have longer names
        return {"body": getattr(models, kind).from_dict({"inputs": [tensor]})}
    bodies = {
        "label_item_inbox_item_label_post": ("LabelBody", {"label": known.get("label")}),
        "feedback_feedback_post": (
            "FeedbackBody",
            {"id": known.get("item"), "label": known.get("label")},
        ),
        "promote_promote_post": ("PromoteMove", {"to": int(known["version"])}),
        "rollback_rollback_post": ("RollbackMove", {"to": 1}),
        "setup_label_studio_setup_post": ("SetupBody", {"schema": LABEL_CONFIG}),
        "predict_tasks_label_studio_predict_post": (
            "BackendPredictBody",
            {"tasks": [{"data": {"dne_item": known.get("item")}}], "label_config": LABEL_CONFIG},
        ),
        "webhook_label_studio_webhook_post": ("WebhookBody", {"action": "PROJECT_UPDATED"}),
    }
    if name not in bodies:
        return {}
    kind, fields = bodies[name]
    return {"body": getattr(models, kind).from_dict(fields)}


if __name__ == "__main__":
    main(*sys.argv[1:])
