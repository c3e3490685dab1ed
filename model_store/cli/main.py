"""Run dne-store: look at versions, check them, and move channels. Starts without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from model_store.cli.command import (
    EXIT_FAILED,
    EXIT_OK,
    Command,
    add_channel_option,
    add_json_option,
    add_reason_option,
    add_store_option,
    add_trust_option,
    add_version_option,
    current_actor,
    print_json,
    run,
    version_number,
)
from model_store.cli.list_command import add_list_options, list_versions
from model_store.errors import ShardCorrupt, ShardMissing, StoreError
from model_store.records.channel import ChannelRecord
from model_store.records.describe import channel_move, details, difference, verdict
from model_store.records.manifest import Manifest
from model_store.records.signing import load_trust
from model_store.store.store import Store
from model_store.tables import columns, counted, percent, printable, size

# Commands that people and scripts wait for: the modules of the other commands are not imported.
QUICK = frozenset({"list", "show", "diff", "promote", "rollback", "resume"})


def main(arguments: Sequence[str] | None = None) -> int:
    asked = sys.argv[1:] if arguments is None else arguments
    parser = build_parser(quick=bool(asked) and asked[0] in QUICK)
    options = parser.parse_args(asked)
    command: Command = options.command
    return run(lambda: command(options))


def build_parser(*, quick: bool = False) -> argparse.ArgumentParser:
    """Build the parser of all commands or, with `quick`, of the quick ones only."""
    parser = argparse.ArgumentParser(
        prog="dne-store", description="Versions of a classifier that grows, and who serves which."
    )
    add_version_option(parser)
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Command, *, help: str) -> argparse.ArgumentParser:
        subparser = subparsers.add_parser(name, help=help, description=help)
        subparser.set_defaults(command=command)
        add_store_option(subparser)
        add_json_option(subparser)
        return subparser

    listing = add("list", list_versions, help="list versions, newest last, and what is served")
    add_list_options(listing)
    _add_version(add("show", show_version, help="show what a version is made of"))
    diff = add("diff", show_difference, help="show what lies between two versions")
    _add_version(diff, "old")
    _add_version(diff, "new")
    verify = add("verify", verify_store, help="check every byte of the store, or of one version")
    _add_version(verify, nargs="?")
    verify.add_argument(
        "--require-signatures",
        action="store_true",
        help="every version must be signed by someone whom the trust file names",
    )
    add_trust_option(verify)
    promote = add("promote", promote_version, help="let a channel name a version and follow on")
    _add_version(promote)
    promote.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not read the version's experts and classifier before the channel is moved",
    )
    rollback = add("rollback", roll_back, help="go back to an earlier version and stay there")
    rollback.add_argument(
        "--to",
        metavar="N",
        type=version_number,
        help="the version to go back to (default: the one that the channel named before)",
    )
    resume = add("resume", resume_channel, help="end a rollback: name the followed version again")
    for subparser in (promote, rollback, resume):
        add_channel_option(subparser)
        add_reason_option(subparser, kept="in the channel's history")
    export = add("export-onnx", export_version, help="write a version as ONNX files")
    _add_version(export)
    export.add_argument(
        "--precision",
        choices=["fp32", "int8"],
        default="fp32",
        help="of the large products: int8 is smaller and faster, and answers nearly the same",
    )
    export.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        required=True,
        help="where to write them: versions in one folder share their experts",
    )
    if not quick:
        from model_store.cli.class_commands import add_class_care_commands
        from model_store.cli.housekeeping_commands import add_housekeeping_commands
        from model_store.cli.key_commands import add_keys_command
        from model_store.cli.mend_command import add_mend_command

        add_class_care_commands(add)
        add_housekeeping_commands(add)
        add_mend_command(add)
        add_keys_command(subparsers)
    return parser


def show_version(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    manifest = store.manifest(options.number)
    found = details(manifest, parent=store.parent_of(manifest))
    if options.json:
        print_json(found)
        return EXIT_OK
    fields = [
        ("version", str(found["version"])),
        ("parent", str(found["parent"] or "none")),
        ("created", found["created"]),
        ("digest", found["digest"]),
        ("signed by", found["signed_by"] or "nobody"),
        ("size", f"{size(found['total_bytes'])}, new {size(found['delta_bytes'])}"),
        ("memory", size(found["memory_bytes"])),
        ("accuracy", percent(found["metrics"]["accuracy"]["all"])),
        ("gate", verdict(manifest)),
    ]
    if found["retired"]:
        fields.append(("retired", ", ".join(found["retired"])))
    print(columns(fields))
    print("\n" + columns([("task", "heads", "classes"), *_task_rows(manifest)]))
    shards = [(ref["kind"], ref["sha256"], size(ref["bytes"])) for ref in found["shards"]]
    print("\n" + columns([("shard", "SHA-256", "size"), *shards]))
    return EXIT_OK


def show_difference(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    found = difference(store.manifest(options.old), store.manifest(options.new))
    if options.json:
        print_json(found)
        return EXIT_OK
    for what in ("tasks", "classes"):
        for sign, move in (("+", "added"), ("-", "removed")):
            if found[what][move]:
                print(f"{sign} {what}: {', '.join(found[what][move])}")
    for sign, move in (("+", "added"), ("-", "removed")):
        for ref in found["shards"][move]:
            print(f"{sign} {ref['kind']} {ref['sha256'][:12]} {size(ref['bytes'])}")
    for name, change in found["metrics"]["accuracy"].items():
        print(f"  accuracy {name}: {percent(change['from'])} → {percent(change['to'])}")
    for name, change in found["metrics"]["per_class"].items():
        print(f"  class {name}: {percent(change['from'])} → {percent(change['to'])}")
    print(f"{size(found['added_bytes'])} new, {size(found['removed_bytes'])} gone")
    return EXIT_OK


def verify_store(options: argparse.Namespace) -> int:
    trust = load_trust(options.trust) if options.require_signatures else None
    report = Store.open(options.store).verify(options.number, trust=trust)
    if options.json:
        print_json({"ok": report.ok, **asdict(report)})
    else:
        for problem in report.problems:
            print(f"bad: {problem}")
        for name in report.unused:
            print(f"unused: {name}")
        verdict = "no problem" if report.ok else f"{len(report.problems)} bad"
        print(
            f"{counted(report.versions, 'version')}, {counted(report.shards, 'shard')} "
            f"({size(report.bytes)}), {counted(report.records, 'channel record')}: {verdict}"
        )
    return EXIT_OK if report.ok else EXIT_FAILED


def promote_version(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    if options.verify:
        _check_servable(store, options.number)
    return _tell_move(store, store.promote(options.number, **_move(options)), options)


def _check_servable(store: Store, version: int) -> None:
    """Check a version before a channel names it: starting servers must be able to load it."""
    from model_store.store.verify import check_servable  # the other quick commands start without it

    manifest = store.manifest(version)
    try:
        check_servable(store, manifest)
    except (ShardMissing, ShardCorrupt) as error:
        raise StoreError(
            f"version {version} was not promoted: {error}; `dne-store verify {version}` names "
            "everything that is damaged, and --no-verify promotes it all the same"
        ) from error


def roll_back(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    return _tell_move(store, store.rollback(to=options.to, **_move(options)), options)


def resume_channel(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    return _tell_move(store, store.resume(**_move(options)), options)


def _move(options: argparse.Namespace) -> dict[str, Any]:
    return {"channel": options.channel, "actor": current_actor(), "reason": options.reason}


def export_version(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    # Here and not above: it imports torch, which no other command needs or should wait for.
    from model_store.onnx.export import export_onnx

    exported = export_onnx(store, options.number, out=options.out, precision=options.precision)
    if options.json:
        print_json(
            {
                "version": options.number,
                "path": str(exported.path),
                "bytes": exported.total_bytes,
                "written_bytes": exported.written_bytes,
            }
        )
    else:
        print(f"version {options.number} is in {exported.path}, with the files that it names")
    return EXIT_OK


def _add_version(
    parser: argparse.ArgumentParser, name: str = "number", *, nargs: str | None = None
) -> None:
    what = {"old": "the version to start from", "new": "the version to end at"}
    parser.add_argument(
        name,
        metavar="N" if name == "number" else name.upper(),
        nargs=nargs,
        type=version_number,
        help=what.get(name, "the number of the version"),
    )


def _task_rows(manifest: Manifest) -> list[tuple[str, str, str]]:
    return [
        (task.name, str(task.heads), ", ".join(manifest.without_retired(task.classes)) or "-")
        for task in manifest.tasks
    ]


def _tell_move(store: Store, record: ChannelRecord, options: argparse.Namespace) -> int:
    previous = _previous_target(store, record)
    if options.json:
        print_json(channel_move(record, previous=previous))
        return EXIT_OK
    before = {None: "before: nothing", record.target: "it did so before"}
    print(
        f"channel {record.channel} names version {record.target} ({record.mode}); "
        + before.get(previous, f"before: version {previous}")
    )
    if record.reason:
        print(f"reason: {printable(record.reason)}")
    return EXIT_OK


def _previous_target(store: Store, record: ChannelRecord) -> int | None:
    if record.number == 1:
        return None
    try:
        return store.record(record.channel, record.number - 1).target
    except StoreError:
        return None  # damaged, and no reason to hide that the new record was written
