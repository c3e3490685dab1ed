"""Keep tensors in a safetensors file together with a JSON record, replaced as a whole."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from lab.results import Note
from model_store.records.manifest import Scalar


def digest(configuration: Mapping[str, Scalar]) -> str:
    """Name a configuration for files that belong to it."""
    text = json.dumps(configuration, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Replace the file as a whole. The caller is the only process that writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: one.contiguous() for name, one in tensors.items()}
    text = json.dumps(record)
    metadata = {"record": text, "sha256": _sha256(plain, text)}
    unfinished = path.with_suffix(".tmp")
    safetensors.torch.save_file(plain, unfinished, metadata=metadata)
    os.replace(unfinished, path)


def read(path: Path, *, note: Note) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read a file and check its digest. Return None where it is missing, or damaged and told."""
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata["sha256"] != _sha256(tensors, metadata["record"]):
            raise ValueError("other bytes than were written")
        return tensors, json.loads(metadata["record"])
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        note(f"{path} is damaged ({error}) and is not used: it is made anew")
        return None


def fits(module: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the tensors have the names and shapes of the module's own."""
    own = {name: one.shape for name, one in module.state_dict().items()}
    return own == {name: one.shape for name, one in tensors.items()}


def _sha256(tensors: Mapping[str, Tensor], record: str) -> str:
    digest = hashlib.sha256(record.encode())
    for name, one in sorted(tensors.items()):
        digest.update(f"{name} {one.dtype} {list(one.shape)}".encode())
        digest.update(one.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def only_one(path: Path, *, note: Note) -> Iterator[None]:
    """Let one process at a time make this file; others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"waiting for another process that makes {path.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
