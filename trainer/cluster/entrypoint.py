"""Turn a command into the shell line that a cluster runs.

The cluster has another working directory, so paths become absolute. Its output is one stream, so
the answer of the command is put behind a mark that nothing else can print.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model_store.errors import WrongUsage
from model_store.tables import counted

UPLOAD_BYTES = 256 << 20
"""Bytes of a folder at most that is uploaded: Ray keeps uploads in the memory of its head node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A command for a cluster."""

    words: tuple[str, ...]
    """The arguments of `dne-train`, without those that send it."""
    paths: Mapping[str, str]
    """Names of files as they were given, by the option that has each."""
    store: str
    upload: Path | None
    """A folder of data to send with the command."""
    name: str | None
    """The task's name, if one was given."""
    threads: int = 1
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrypoint:
    """A shell line, the mark that its answer follows, and the folder to upload, if any."""

    line: str
    mark: str
    upload: Path | None = None


def make_entrypoint(sent: Sent) -> Entrypoint:
    """Make the line that runs a command on the cluster."""
    words = ["dne-train", *sent.words]
    # The last one counts. A value may begin with a dash, hence the equals sign.
    words += [f"{option}={_absolute(path)}" for option, path in sent.paths.items()]
    upload = None if sent.upload is None else _checked(sent.upload)
    if upload is not None:
        words += ["--data=.", f"--name={sent.name or upload.name}"]
    mark = f"dne-train-answer-{secrets.token_hex(16)}"
    line = f"answer=$({shlex.join(words)}); code=$?; "
    return Entrypoint(
        line=f"{line}printf '%s\\n' {mark} \"$answer\"; exit $code", mark=mark, upload=upload
    )


def _absolute(text: str) -> str:
    return text if "://" in text else os.path.abspath(text)


def _checked(data: Path) -> Path:
    """Return the folder to upload, unless it is too large."""
    folder = data.resolve()
    if not folder.is_dir():
        raise WrongUsage(f"`data={data}` is not a folder of this machine: nothing to send")
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    if size > UPLOAD_BYTES:
        raise WrongUsage(
            f"`data={data}` has {counted(len(files), 'file')} of {size >> 20} MiB, and an upload "
            f"has {UPLOAD_BYTES >> 20} MiB at most: put the folder where the cluster reads it, and "
            "leave --ray-upload out"
        )
    return folder
