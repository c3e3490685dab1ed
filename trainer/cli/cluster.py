"""Declare the options that send a command to a cluster, and hand it over."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from trainer.cluster.entrypoint import Sent

PATHS = {
    "data": "--data",
    "val_data": "--val-data",
    "checkpoint": "--checkpoint",
    "hierarchy": "--hierarchy",
    "file": "--pretrained",
    "sign": "--sign",
    "trust": "--trust",
    "store": "--store",
}
"""Options that name files, by their names in the result of argparse."""
NOT_PATHS = {("hierarchy", "folders")}


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


def sent_to_cluster(options: argparse.Namespace, arguments: Sequence[str]) -> Sent:
    """Describe the command for a cluster. `options` is what the arguments were parsed to."""
    given = {name: getattr(options, name, None) for name in PATHS}
    paths = {
        PATHS[name]: str(value)
        for name, value in given.items()
        if value is not None and (name, value) not in NOT_PATHS
    }
    return Sent(
        words=tuple(_without_cluster_options(arguments)),
        paths=paths,
        store=options.store,
        upload=options.data if options.ray_upload else None,
        name=getattr(options, "name", None),
        threads=options.threads or 1,
        gpus=1 if options.device == "cuda" else 0,
    )


def _without_cluster_options(arguments: Sequence[str]) -> list[str]:
    known = argparse.ArgumentParser(add_help=False)
    add_cluster_options(known)
    return known.parse_known_args(arguments)[1]
