"""Run `dne-store retire-class` and `dne-store rename-class`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from model_store.cli.command import (
    EXIT_NOT_PROMOTED,
    EXIT_OK,
    Add,
    add_channel_option,
    add_key_options,
    add_reason_option,
    current_actor,
    print_json,
    read_keys,
)
from model_store.maintenance.edit_classes import Care, CareOutcome, rename_class, retire_class
from model_store.records.manifest import delta_of, total_bytes
from model_store.store.store import Store
from model_store.tables import counted, printable


def add_class_care_commands(add: Add) -> None:
    retire = add("retire-class", retire_one, help="publish a version that never answers a class")
    retire.add_argument("class_name", metavar="NAME", help="the class to retire")
    rename = add("rename-class", rename_one, help="publish a version with another class name")
    rename.add_argument("class_name", metavar="OLD", help="the class as it is called now")
    rename.add_argument("new_name", metavar="NEW", help="what it is to be called")
    for subparser in (retire, rename):
        add_channel_option(subparser)
        add_key_options(subparser)
        subparser.add_argument(
            "--no-promote", action="store_true", help="publish only; the channel does not move"
        )
        add_reason_option(subparser, kept="in the channel's history")


def retire_one(options: argparse.Namespace) -> int:
    outcome = retire_class(options.class_name, care=_care(options))
    told = {"retired_class": options.class_name}
    return _tell(outcome, f"class {printable(options.class_name)} is retired", told, options)


def rename_one(options: argparse.Namespace) -> int:
    outcome = rename_class(options.class_name, options.new_name, care=_care(options))
    told = {"renamed_class": options.class_name, "new_name": options.new_name}
    done = f"class {printable(options.class_name)} is called {printable(options.new_name)}"
    return _tell(outcome, done, told, options)


def _care(options: argparse.Namespace) -> Care:
    return Care(
        store=Store.open(options.store, keys=read_keys(options)),
        channel=options.channel,
        actor=current_actor(),
        reason=options.reason,
        promote=not options.no_promote,
    )


def _tell(
    outcome: CareOutcome, done: str, told: dict[str, str], options: argparse.Namespace
) -> int:
    manifest = outcome.manifest
    for note in outcome.notes:
        print(f"note: {note}", file=sys.stderr)
    if options.json:
        print_json({**told, **_as_json(outcome)})
    else:
        answers = counted(len(manifest.classes), "class", "classes")
        served = f", promoted in {options.channel}" if outcome.promoted else ""
        print(f"version {manifest.version}: {done}; {answers}{served}")
        if outcome.refused:
            print(f"not promoted: {outcome.refused}", file=sys.stderr)
        elif not outcome.promoted:
            print("published and, as asked, not promoted")
    return EXIT_NOT_PROMOTED if outcome.refused else EXIT_OK


def _as_json(outcome: CareOutcome) -> dict[str, Any]:
    manifest = outcome.manifest
    return {
        "version": manifest.version,
        "parent": manifest.parent,
        "classes": len(manifest.classes),
        "retired": list(manifest.retired),
        "promoted": outcome.promoted,
        "refused": outcome.refused,
        "notes": list(outcome.notes),
        "delta_bytes": total_bytes(delta_of(manifest, outcome.parent)),
    }
