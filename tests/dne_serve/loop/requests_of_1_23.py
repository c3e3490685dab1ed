"""Requests as Label Studio 1.23.2 sends them to an ML backend, with the members of its source."""

from __future__ import annotations

from typing import Any

from model_store.loop.label_studio import LABEL_CONFIG

WHEN = "2026-11-17T12:00:00.123456Z"
LATER = "2026-11-17T12:05:00.000000Z"


def setup_request(config: str = LABEL_CONFIG) -> dict[str, Any]:
    return {
        "project": "3.1795000000",
        "schema": config,
        "hostname": "http://localhost:8080",
        "access_token": "a-secret-of-the-project",
        "extra_params": None,
    }


def task_of(data: dict[str, Any], *, number: int = 11) -> dict[str, Any]:
    return {
        "id": number,
        "data": data,
        "meta": {},
        "created_at": WHEN,
        "updated_at": WHEN,
        "is_labeled": False,
        "overlap": 1,
        "inner_id": 1,
        "total_annotations": 0,
        "cancelled_annotations": 0,
        "project": 3,
        "annotations": [],
        "predictions": [],
    }


def predict_request(*data: dict[str, Any], config: str = LABEL_CONFIG) -> dict[str, Any]:
    return {
        "tasks": [task_of(one, number=place) for place, one in enumerate(data, start=11)],
        "project": "3.1795000000",
        "label_config": config,
        "params": {"login": None, "password": None, "context": None},
    }


def chosen(*names: str, control: str = "class") -> dict[str, Any]:
    return {
        "id": "aBcD",
        "from_name": control,
        "to_name": "image",
        "type": "choices",
        "origin": "manual",
        "value": {"choices": list(names)},
    }


def typed(text: str, control: str = "new_class") -> dict[str, Any]:
    return {
        "id": "eFgH",
        "from_name": control,
        "to_name": "image",
        "type": "textarea",
        "origin": "manual",
        "value": {"text": [text]},
    }


def annotation_of(
    *result: dict[str, Any], number: int = 51, time: str = WHEN, **others: Any
) -> dict[str, Any]:
    return {
        "id": number,
        "result": list(result),
        "created_at": WHEN,
        "updated_at": time,
        "was_cancelled": False,
        "ground_truth": False,
        "lead_time": 2.5,
        "task": 11,
        "project": 3,
        "completed_by": 1,
        "updated_by": 1,
        **others,
    }


def event(
    action: str, annotation: dict[str, Any], data: dict[str, Any], *, config: str = LABEL_CONFIG
) -> dict[str, Any]:
    return {
        "action": action,
        "annotation": annotation,
        "task": task_of(data),
        "project": project_of(config),
    }


def deletion(*numbers: int, project: int = 3) -> dict[str, Any]:
    return {
        "action": "ANNOTATIONS_DELETED",
        "annotations": [{"id": number} for number in numbers],
        "project": {**project_of(), "id": project},
    }


def project_of(config: str = LABEL_CONFIG) -> dict[str, Any]:
    return {"id": 3, "title": "dne-serve", "label_config": config, "task_number": 1}
