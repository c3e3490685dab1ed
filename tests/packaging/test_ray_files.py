"""`deploy/ray/serve.yaml` names what exists. `make test SUITE=scale` deploys it to a real Ray."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import yaml

from dne_serve import ray_app
from dne_serve.settings import Settings
from tests.packaging.project import ROOT


def served() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
    return loaded


def application() -> dict[str, Any]:
    [found] = served()["applications"]
    return dict(found)


def test_the_import_path_names_the_builder() -> None:
    module, _, name = application()["import_path"].partition(":")
    assert getattr(importlib.import_module(module), name) is ray_app.app


def test_every_argument_is_a_setting_and_none_is_a_secret() -> None:
    arguments = application()["args"]
    assert arguments.keys() <= Settings.model_fields.keys() | {ray_app.START}
    ray_app.read_settings({name: one for name, one in arguments.items() if name != ray_app.START})
    assert "token_file" in arguments  # or no replica starts


def test_the_deployment_is_ours_and_grows_with_the_requests_on_it() -> None:
    [deployment] = application()["deployments"]
    assert deployment["name"] == ray_app.NAME
    assert ray_app.OPTIONS.keys() <= deployment.keys()
    scaling = deployment["autoscaling_config"]
    assert 2 <= scaling["min_replicas"] < scaling["max_replicas"]
    assert scaling["target_ongoing_requests"] < deployment["max_ongoing_requests"]


def test_a_request_in_a_replica_ends_before_the_proxy_gives_it_up() -> None:
    """Else a client reads Ray's 408, and the replica goes on for nobody."""
    defaults = Settings()
    assert served()["http_options"]["request_timeout_s"] > defaults.max_wait_seconds
    [deployment] = application()["deployments"]
    assert deployment["graceful_shutdown_timeout_s"] > defaults.max_wait_seconds


def test_the_proxy_listens_on_this_machine_until_somebody_changes_it() -> None:
    assert served()["http_options"]["host"] == "127.0.0.1"


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="RAY DID NOT READ THE FILE")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own classes
def test_ray_accepts_the_file() -> None:
    schema = importlib.import_module("ray.serve.schema").ServeDeploySchema
    assert schema.model_validate(served()).applications[0].name == ray_app.NAME
