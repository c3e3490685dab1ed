"""Turn the arguments of a command into the shell line that a cluster runs.

The cluster has another working directory, so paths become absolute. Its output is one stream, so
the answer of the command is put behind a mark that nothing else can print.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model_store.errors import WrongUsage
from model_store.tables import counted

PATHS = {
    "data": "--data",
    "val_data": "--val-data",
    "checkpoint": "--checkpoint",
    "hierarchy": "--hierarchy",
    "file": "--pretrained",
    "sign": "--sign",
    "store": "--store",
}
"""Options that name files, by their names in the result of argparse."""
NOT_PATHS = {("hierarchy", "folders")}
UPLOAD_BYTES = 256 << 20
"""Bytes of a folder at most that is uploaded: Ray keeps uploads in the memory of its head node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrypoint:
    """A shell line, the mark that its answer follows, and the folder to upload, if any."""

    line: str
    mark: str
    upload: Path | None = None


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "a cluster", "Data and store must be where the cluster reads them by the same names."
    )
    group.add_argument(
        "--on",
        choices=["ray"],
        help="learn as a job of a Ray cluster, and follow it from here; Ctrl-C stops the job",
    )
    group.add_argument(
        "--ray-address",
        metavar="URL",
        default=os.environ.get("RAY_API_SERVER_ADDRESS") or "http://127.0.0.1:8265",
        help="address of the cluster's dashboard (default: $RAY_API_SERVER_ADDRESS, else "
        "http://127.0.0.1:8265)",
    )
    group.add_argument(
        "--ray-upload",
        action="store_true",
        help="send the folder of --data to the cluster with the job; 256 MiB at most",
    )


def make_entrypoint(options: argparse.Namespace, arguments: Sequence[str]) -> Entrypoint:
    """Make the line that runs `arguments` on the cluster. `options` is what they were parsed to."""
    words = ["dne-train", *_without_cluster_options(arguments)]
    for name, option in PATHS.items():
        value = getattr(options, name, None)
        # The last one counts. A value may begin with a dash, hence the equals sign.
        if value is not None and (name, str(value)) not in NOT_PATHS:
            words.append(f"{option}={_absolute(str(value))}")
    upload = _upload(options) if options.ray_upload else None
    if upload is not None:
        words += ["--data=.", f"--name={getattr(options, 'name', upload.name)}"]
    mark = f"dne-train-answer-{secrets.token_hex(16)}"
    line = f"answer=$({shlex.join(words)}); code=$?; "
    return Entrypoint(
        line=f"{line}printf '%s\\n' {mark} \"$answer\"; exit $code", mark=mark, upload=upload
    )


def _without_cluster_options(arguments: Sequence[str]) -> list[str]:
    known = argparse.ArgumentParser(add_help=False)
    add_cluster_options(known)
    return known.parse_known_args(arguments)[1]


def _absolute(text: str) -> str:
    return text if "://" in text else os.path.abspath(text)


def _upload(options: argparse.Namespace) -> Path:
    folder = Path(str(options.data)).resolve()
    if not folder.is_dir():
        raise WrongUsage(f"--data {options.data} is not a folder of this machine: nothing to send")
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    if size > UPLOAD_BYTES:
        raise WrongUsage(
            f"--data {options.data} has {counted(len(files), 'file')} of {size >> 20} MiB, and "
            f"--ray-upload sends {UPLOAD_BYTES >> 20} MiB at most: put the folder where the "
            "cluster reads it, and leave --ray-upload out"
        )
    return folder
