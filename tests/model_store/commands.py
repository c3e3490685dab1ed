"""Run `dne-store` in this process, and read what it prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from model_store.cli.main import main

Capture = pytest.CaptureFixture[str]


def text_of(capsys: Capture, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def json_of(capsys: Capture, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text_of(capsys, *arguments, "--json").splitlines()[-1])
    return found
