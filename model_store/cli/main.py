"""Run dne-store: look at versions, check them, and move channels. Starts without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from model_store.cli.channel_commands import add_channel_commands
from model_store.cli.command import (
    EXIT_FAILED,
    EXIT_OK,
    Command,
    add_trust_option,
    add_version_argument,
    add_version_option,
    adder,
    print_json,
    run,
    show_result,
)
from model_store.cli.list_command import add_list_options, list_versions
from model_store.command_line import Parser
from model_store.records.describe import details, difference, verdict
from model_store.records.manifest import Manifest
from model_store.records.signing import load_trust
from model_store.store.store import Store
from model_store.tables import columns, counted, percent, printable, size

# Commands that people and scripts wait for: the modules of the other commands are not imported.
QUICK = frozenset({"list", "show", "diff", "promote", "rollback", "resume", "history"})


def main(arguments: Sequence[str] | None = None) -> int:
    asked = sys.argv[1:] if arguments is None else arguments
    parser = build_parser(quick=bool(asked) and asked[0] in QUICK)
    options = parser.parse_args(asked)
    command: Command = options.command
    return run(lambda: command(options))


def build_parser(*, quick: bool = False) -> argparse.ArgumentParser:
    """Build the parser of all commands or, with `quick`, of the quick ones only."""
    parser = Parser(
        prog="dne-store", description="Versions of a classifier that grows, and who serves which."
    )
    add_version_option(parser)
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    add = adder(subparsers)
    listing = add("list", list_versions, help="list versions, newest last, and what is served")
    add_list_options(listing)
    show = add("show", show_version, help="show what a version is made of")
    add_version_argument(show)
    show.add_argument(
        "--advice", action="store_true", help="say what would help the version most instead"
    )
    diff = add("diff", _show_difference, help="show what lies between two versions")
    add_version_argument(diff, "old")
    add_version_argument(diff, "new")
    verify = add("verify", verify_store, help="check every byte of the store, or of one version")
    add_version_argument(verify, nargs="?")
    verify.add_argument(
        "--require-signatures",
        action="store_true",
        help="every version must be signed by someone whom the trust file names",
    )
    add_trust_option(verify)
    add_channel_commands(add)
    export = add("export-onnx", _export_version, help="write a version as ONNX files")
    add_version_argument(export)
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
        from model_store.cli.housekeeping_commands import (
            add_housekeeping_commands,
            add_mend_command,
        )
        from model_store.cli.inbox_command import add_inbox_command, add_relabel_command
        from model_store.cli.key_commands import add_keys_command
        from model_store.cli.removal_commands import add_class_care_commands, add_removal_commands

        add_class_care_commands(add)
        add_housekeeping_commands(add)
        add_removal_commands(add)
        add_mend_command(add)
        add_keys_command(subparsers)
        add_inbox_command(subparsers)
        add_relabel_command(add)
    return parser


def _show_advice(store: Store, manifest: Manifest, options: argparse.Namespace) -> int:
    """Show all that the trainer advised when it made the version."""
    from model_store.report.advice import described, in_full, read_advice

    advice = read_advice(store, manifest)
    lines = [f"there is no advice on version {manifest.version}"]
    if advice is not None:
        lines = list(map(printable, in_full(advice)))
    facts = {"version": manifest.version, "advice": described(advice)}
    return show_result(options, facts, *lines)


def show_version(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    manifest = store.manifest(options.number)
    if options.advice:
        return _show_advice(store, manifest, options)
    facts = details(manifest, parent=store.parent_of(manifest))
    if options.json:
        print_json(facts)
        return EXIT_OK
    fields = [
        ("version", str(facts["version"])),
        ("parent", str(facts["parent"] or "none")),
        ("created", facts["created"]),
        ("digest", facts["digest"]),
        ("signed by", facts["signed_by"] or "nobody"),
        ("size", f"{size(facts['total_bytes'])}, new {size(facts['delta_bytes'])}"),
        ("memory", size(facts["memory_bytes"])),
        ("accuracy", percent(facts["metrics"]["accuracy"]["all"])),
        ("gate", verdict(manifest)),
    ]
    if facts["retired"]:
        fields.append(("retired", ", ".join(facts["retired"])))
    print(columns(fields))
    tasks = [
        (task.name, str(task.heads), ", ".join(manifest.without_retired(task.classes)) or "-")
        for task in manifest.tasks
    ]
    print("\n" + columns([("task", "heads", "classes"), *tasks]))
    kinds: dict[str, list[int]] = {}
    for ref in facts["shards"]:
        kinds.setdefault(ref["kind"], []).append(ref["bytes"])
    shards = [(kind, str(len(every)), size(sum(every))) for kind, every in kinds.items()]
    print("\n" + columns([("shards", "files", "size"), *shards]))
    print(f"`dne-store show {options.number} --json` lists them with their SHA-256")
    return EXIT_OK


def _show_difference(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    change_set = difference(store.manifest(options.old), store.manifest(options.new))
    if options.json:
        print_json(change_set)
        return EXIT_OK
    for what in ("tasks", "classes"):
        for sign, side in (("+", "added"), ("-", "removed")):
            if change_set[what][side]:
                print(f"{sign} {what}: {', '.join(change_set[what][side])}")
    for sign, side in (("+", "added"), ("-", "removed")):
        for ref in change_set["shards"][side]:
            print(f"{sign} {ref['kind']} {ref['sha256'][:12]} {size(ref['bytes'])}")
    for name, change in change_set["metrics"]["accuracy"].items():
        print(f"  accuracy {name}: {percent(change['from'])} → {percent(change['to'])}")
    for name, change in change_set["metrics"]["per_class"].items():
        print(f"  class {name}: {percent(change['from'])} → {percent(change['to'])}")
    print(f"{size(change_set['added_bytes'])} new, {size(change_set['removed_bytes'])} gone")
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


def _export_version(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    # Here and not above: it imports torch, which no other command needs or should wait for.
    from model_store.onnx.export import export_onnx

    exported = export_onnx(store, options.number, out=options.out, precision=options.precision)
    facts = {
        "version": options.number,
        "path": str(exported.path),
        "bytes": exported.total_bytes,
        "written_bytes": exported.written_bytes,
    }
    said = f"version {options.number} is in {exported.path}, with the files that it names"
    return show_result(options, facts, said)
