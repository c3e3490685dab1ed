"""Keep tensors in a safetensors file together with a JSON record, replaced as a whole."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from model_store.records.manifest import Scalar


def digest(configuration: Mapping[str, Scalar]) -> str:
    """Name a configuration for files that belong to it."""
    text = json.dumps(configuration, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.tmp")
    safetensors.torch.save_file(
        {name: one.contiguous() for name, one in tensors.items()},
        unfinished,
        metadata={"record": json.dumps(record)},
    )
    os.replace(unfinished, path)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safetensors.safe_open(path, framework="pt") as file:
        record = json.loads(file.metadata()["record"])
        return {name: file.get_tensor(name) for name in file.keys()}, record  # noqa: SIM118


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Let one process at a time make this file; others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
