"""The Helm chart refuses values that do not exist or do not fit, and says which."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.packaging.kubernetes import Object, documents
from tests.packaging.test_helm import CHART, helm


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("devcie=cpu", "Additional property devcie is not allowed"),
        ("store.s3.bucket=b", "Additional property bucket is not allowed"),
        ("store.kind=disk", 'store.kind must be one of the following: "volume", "s3"'),
        ("store.kind=s3", "store.s3.url is empty: name the bucket, as in s3://bucket/prefix."),
        ("store.s3.url=gs://bucket", "store.s3.url: Does not match pattern '^(s3://"),
        ("image.digest=abc", "image.digest: Does not match pattern '^(sha256:"),
        ("resources.cpu=500m", "resources.cpu: Invalid type. Expected: integer, given: string"),
        ("resources.memory=4096", "resources.memory: Invalid type. Expected: string"),
        ("drainSeconds=0", "drainSeconds: Must be greater than or equal to 1"),
        ("gpu=yes", "gpu: Invalid type. Expected: boolean, given: string"),
        ("tokens.secret=", "tokens.secret: Does not match pattern"),
        ("autoscaling.minReplicas=1", "minReplicas: Must be greater than or equal to 2"),
        ("autoscaling.minReplicas=9", "minReplicas is 9 and autoscaling.maxReplicas 8: raise"),
        ("env.PATH=x", 'env: Property name of "PATH" does not match'),
        ("env.DNE_HOST=x", "env.DNE_HOST: the chart sets DNE_HOST itself"),
        ("env.DNE_ADMIN_TOKEN=x", "put it into the Secret that tokens.secret names."),
        ("training.addTask.name=My_Task", "training.addTask.name: Does not match pattern"),
        ("training.deepen.schedule=nightly", "training.deepen.schedule: Does not match pattern"),
    ],
)
def test_a_bad_value_is_refused_and_named(value: str, message: str) -> None:
    done = helm("template", "dne-serve", str(CHART), "--set", value)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_schema_knows_exactly_the_values_of_the_file() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    (values,) = documents(CHART / "values.yaml")
    known = known_values(schema, schema["definitions"])
    assert known - {("global",)} == given_values(values)


def known_values(schema: Object, definitions: Object) -> set[tuple[str, ...]]:
    """List the paths of all values that a schema describes by name."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "properties" not in schema:
        return {()}
    assert schema["additionalProperties"] is False
    return {
        (name, *rest)
        for name, below in schema["properties"].items()
        for rest in known_values(below, definitions)
    }


def given_values(values: Any) -> set[tuple[str, ...]]:
    if not isinstance(values, dict) or not values:
        return {()}
    return {(name, *rest) for name, below in values.items() for rest in given_values(below)}
