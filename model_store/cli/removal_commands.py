"""Run `dne-store delete` and `forget`: look first, ask at a terminal, then remove."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from model_store.cli.command import (
    EXIT_FAILED,
    EXIT_NOT_PROMOTED,
    EXIT_OK,
    Add,
    add_channel_option,
    add_key_options,
    add_reason_option,
    add_version_argument,
    current_actor,
    open_head,
    print_json,
    read_keys,
    show_result,
)
from model_store.errors import WrongUsage
from model_store.maintenance.edit_classes import (
    FITTED,
    Care,
    CareOutcome,
    rename_class,
    retire_class,
    set_thresholds,
)
from model_store.maintenance.forget import (
    CANNOT_BE_UNDONE,
    ForgetReport,
    check_deletable,
    delete_version,
    forget_class,
    look_up,
)
from model_store.records.describe import change
from model_store.records.manifest import delta_of, total_bytes
from model_store.store.store import Store
from model_store.tables import columns, counted, percent, printable, size


def add_class_care_commands(add: Add) -> None:
    retire = add("retire-class", _retire_one, help="publish a version that never answers a class")
    retire.add_argument("class_name", metavar="NAME", help="the class to retire")
    rename = add("rename-class", _rename_one, help="publish a version with another class name")
    rename.add_argument("class_name", metavar="OLD", help="the class as it is called now")
    rename.add_argument("new_name", metavar="NEW", help="what it is to be called")
    threshold = add(
        "threshold",
        _set_or_list_thresholds,
        help="publish a version with thresholds of single classes for unknown images; list them",
    )
    threshold.add_argument(
        "pairs",
        metavar="NAME SHARE",
        nargs="*",
        help="a class, and the probability of none of the classes above which an image that looks "
        "most like it is unknown: 0.3 or 30%%, or fitted, which takes the class's own threshold "
        "back; several pairs; without any, list the thresholds",
    )
    for subparser in (retire, rename, threshold):
        add_channel_option(subparser)
        add_key_options(subparser)
        subparser.add_argument(
            "--no-promote", action="store_true", help="publish only; the channel does not move"
        )
        add_reason_option(subparser, kept="in the channel's history")


def _retire_one(options: argparse.Namespace) -> int:
    outcome = retire_class(options.class_name, care=_care(options))
    told = {"retired_class": options.class_name}
    return _tell(outcome, f"class {printable(options.class_name)} is retired", told, options)


def _rename_one(options: argparse.Namespace) -> int:
    outcome = rename_class(options.class_name, options.new_name, care=_care(options))
    told = {"renamed_class": options.class_name, "new_name": options.new_name}
    done = f"class {printable(options.class_name)} is called {printable(options.new_name)}"
    return _tell(outcome, done, told, options)


def _set_or_list_thresholds(options: argparse.Namespace) -> int:
    words: Sequence[str] = options.pairs
    if not words:
        return _list_thresholds(options)
    if len(words) % 2:
        raise WrongUsage(
            f"{words[-1]!r} has no threshold: write NAME SHARE, and then the next pair"
        )
    pairs = zip(words[::2], words[1::2], strict=True)
    asked = {name: _threshold(said) for name, said in pairs}
    if 2 * len(asked) != len(words):
        raise WrongUsage("name each class once")
    outcome = set_thresholds(asked, care=_care(options))
    names = ", ".join(map(printable, asked))
    return _tell(outcome, f"thresholds of {names} are set", {"thresholds": asked}, options)


def _threshold(text: str) -> float | None:
    """Read a share as `dne-train` does: one above 1 is meant in percent."""
    if text == "fitted":
        return FITTED
    try:
        value = float(text.removesuffix("%"))
    except ValueError as error:
        raise WrongUsage(f"{text[:80]!r} is not a share: give 0.3, 30% or fitted") from error
    return value / 100 if text.endswith("%") or value > 1 else value


def _list_thresholds(options: argparse.Namespace) -> int:
    _, manifest = open_head(options)
    unknown = manifest.unknown
    facts = unknown and unknown.model_dump(include={"score", "threshold", "by_class"})
    if options.json:
        print_json({"version": manifest.version, "unknown": facts})
        return EXIT_OK
    own = unknown.by_class if unknown else {}
    rows = [
        (name, percent(one.above), one.actor, one.time, one.reason) for name, one in own.items()
    ]
    if rows:
        print(columns([("class", "unknown above", "who", "when", "reason"), *rows]))
    classes = counted(len(rows), "class with a threshold of its own", "classes with their own")
    print(f"version {manifest.version}: {classes}, of {len(manifest.classes)}")
    return EXIT_OK


def _care(options: argparse.Namespace) -> Care:
    return Care(
        store=Store.open(options.store, keys=read_keys(options)),
        channel=options.channel,
        actor=current_actor(),
        reason=options.reason,
        promote=not options.no_promote,
    )


def _tell(
    outcome: CareOutcome, done: str, told: Mapping[str, Any], options: argparse.Namespace
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


def add_removal_commands(add: Add) -> None:
    delete = add("delete", _delete_one, help="delete a version that no channel names")
    add_version_argument(delete)
    forget = add("forget", _forget_one, help="remove the kept images of a class from every version")
    forget.add_argument(
        "--class", dest="class_name", metavar="NAME", required=True, help="the class to forget"
    )
    for subparser in (delete, forget):
        add_reason_option(subparser, kept="in the tombstone")
        subparser.add_argument(
            "--dry-run", action="store_true", help="say what would be removed, and remove nothing"
        )
        subparser.add_argument(
            "--yes", action="store_true", help="do not ask at a terminal before it is removed"
        )


def _delete_one(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    manifest = check_deletable(store, options.number)
    what = f"version {manifest.version} ({printable(change(manifest, store.parent_of(manifest)))})"
    if options.dry_run:
        return _told(options, {"version": manifest.version}, f"{what} would be deleted")
    if not _agreed(options, f"Delete {what}? It cannot be undone."):
        return _left_alone()
    tombstone = delete_version(store, options.number, actor=current_actor(), reason=options.reason)
    return show_result(
        options,
        tombstone.model_dump(exclude={"format"}),
        f"version {tombstone.version} is deleted; `dne-store gc --sweep` frees what no other "
        "version needs",
    )


def _forget_one(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    name = printable(options.class_name)
    if options.dry_run or _asks(options):
        preview = look_up(store, options.class_name)
        if options.dry_run:
            return _told(options, asdict(preview), _images(preview, "would be gone from"))
        question = (
            f"Remove the images of {name} ({size(preview.bytes)}, and "
            f"{counted(preview.inbox_items, 'item')} of the inbox)? It cannot be undone."
        )
        if (preview.shards or preview.inbox_items) and not _agreed(options, question):
            return _left_alone()
    report = forget_class(store, options.class_name, actor=current_actor(), reason=options.reason)
    if options.json:
        print_json({**asdict(report), "not_undone": (*_left(report), *CANNOT_BE_UNDONE)})
        return EXIT_OK
    print(_images(report, "are gone from"))
    if report.inbox_items:
        print(f"{counted(report.inbox_items, 'item')} of the inbox with that class are gone")
    if report.other_classes:
        others = ", ".join(map(printable, report.other_classes))
        print(f"the same images were kept for {others}, and are gone there too")
    if report.jobs:
        print(f"{counted(report.jobs, 'job')} whose log named the class are gone")
    if report.cache_files:
        print(f"{counted(report.cache_files, 'file')} of training runs on this machine are gone")
    print("not undone:")
    for what in (*_left(report), *CANNOT_BE_UNDONE):
        print(f"- {what}")
    return EXIT_OK


def _left(report: ForgetReport) -> list[str]:
    """List what this removal in particular could not reach."""
    left = [f"a file that cannot be deleted: {printable(path)}" for path in report.not_deleted]
    if report.runs:
        left.append(
            f"{counted(report.runs, 'training run')} under way: one that has learnt from pictures "
            "which are gone publishes nothing; one that reads a folder learns what the folder has"
        )
    return left


def _images(report: ForgetReport, verb: str) -> str:
    name = printable(report.class_name)
    if report.also_called:
        name += f" (also called {', '.join(map(printable, report.also_called))})"
    if not report.shards:
        return f"no version keeps images of {name}"
    versions = ", ".join(map(str, report.versions))
    return f"the images of {name} {verb} versions {versions} ({size(report.bytes)})"


def _told(options: argparse.Namespace, facts: dict[str, object], sentence: str) -> int:
    """Print the end of a dry run."""
    return show_result(options, {**facts, "dry_run": True}, f"{sentence}; nothing was changed")


def _asks(options: argparse.Namespace) -> bool:
    """Return whether a person can be asked: scripts must not wait for an answer."""
    return not (options.yes or options.json) and sys.stdin.isatty() and sys.stdout.isatty()


def _agreed(options: argparse.Namespace, question: str) -> bool:
    if not _asks(options):
        return True
    try:
        return input(f"{question} [y/N] ").strip().lower() in {"y", "yes"}
    except EOFError:
        return False


def _left_alone() -> int:
    print("nothing was changed")
    return EXIT_FAILED
