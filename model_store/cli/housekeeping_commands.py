"""Run `dne-store init`, `borrowers`, `storage`, `gc`, `copy`, `bundle` and `unbundle`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from model_store.backends.base import Entry
from model_store.cli.command import (
    EXIT_OK,
    Add,
    add_alternate_option,
    add_channel_option,
    add_reason_option,
    current_actor,
    print_json,
    show_result,
    version_number,
)
from model_store.errors import WrongUsage
from model_store.layout import record_name
from model_store.maintenance.bundle import take_bundle, write_bundle
from model_store.maintenance.copy import CopyReport, Progress, copy_store
from model_store.maintenance.gc import GRACE_S, GcReport, collect_garbage, report_storage
from model_store.maintenance.mend import Mender, MendReport, Stray, mend_channel
from model_store.records.signing import NO_KEYS, Keys, load_signer, load_trust
from model_store.store.alternates import Borrowing, list_borrowers, release
from model_store.store.store import Store
from model_store.tables import columns, counted, printable, size


def add_housekeeping_commands(add: Add) -> None:
    init = add("init", _make_store, help="make an empty store, unless there is one")
    add_alternate_option(init, after="; a store that has it already is announced there again")
    borrowers = add("borrowers", _show_borrowers, help="list the stores that borrow from this one")
    borrowers.add_argument(
        "--release",
        metavar="ID",
        help="let go of a store that is gone: gc may then delete what only that store needed",
    )
    add("storage", _show_storage, help="show what each version costs and what could go")
    gc = add("gc", collect, help="find shards that no version names; with --sweep take them away")
    gc.add_argument(
        "--sweep",
        action="store_true",
        help="condemn what no version names, and delete what an earlier run has condemned "
        "(default: only say what would be done)",
    )
    gc.add_argument(
        "--grace",
        metavar="HOURS",
        type=_hours,
        default=GRACE_S / 3600,
        help="how long a shard stays condemned before it is deleted (default: %(default)g)",
    )
    copy = add("copy", _copy_all, help="copy all versions and channels to another store")
    copy.add_argument(
        "--to",
        metavar="STORE",
        required=True,
        help="the store to copy to, made when there is none: a directory or s3://bucket/prefix",
    )
    copy.add_argument(
        "--sign",
        metavar="KEYFILE",
        type=Path,
        help="sign versions and channel records again with this private key, for the store that "
        "they are copied to (default: leave signatures as they are)",
    )
    copy.add_argument(
        "--trust",
        metavar="FILE",
        type=Path,
        help="with --sign: sign only what is signed by someone whom this file names (default: "
        "$DNE_TRUST, else sign everything that the gate did not refuse)",
    )
    bundle = add("bundle", _bundle, help="write what another store lacks into one file")
    bundle.add_argument(
        "--since",
        metavar="N",
        type=version_number,
        default=0,
        help="the other store has all versions up to N (default: none)",
    )
    bundle.add_argument("--out", metavar="FILE", type=Path, required=True, help="the file to write")
    unbundle = add("unbundle", _unbundle, help="take versions and channels out of such a file")
    unbundle.add_argument("file", metavar="FILE", type=Path, help="the file that bundle wrote")
    unbundle.add_argument(
        "--sign",
        metavar="KEYFILE",
        type=Path,
        help="sign versions and channel records again with this private key, for the store that "
        "they are taken into (default: leave signatures as they are)",
    )
    unbundle.add_argument(
        "--trust",
        metavar="FILE",
        type=Path,
        help="take only what is signed by someone whom this file names (default: $DNE_TRUST, else "
        "take everything)",
    )


def _make_store(options: argparse.Namespace) -> int:
    store = Store.create(options.store, alternates=options.alternate)
    named = [alternate.location for alternate in store.alternates.named]
    versions = len(store.versions())
    facts = {"id": store.id, "versions": versions, "alternates": named}
    said = f"the store {options.store} is there, with {counted(versions, 'version')}"
    if named:
        said += f"; it borrows experts from {', '.join(map(printable, named))}"
    return show_result(options, facts, said)


def _show_borrowers(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    if options.release:
        gone = release(store.objects, options.release, location=options.store)
        said = f"store {options.release} is released; it was at {_places(gone)}"
        return show_result(options, {"released": options.release}, said)
    found = list_borrowers(store.objects, location=options.store)
    facts = {"borrowers": [asdict(one) for one in found]}
    rows = [(one.id, _state(one), printable(one.location)) for one in found]
    lines = [columns([("id", "state", "location"), *rows])] if rows else []
    return show_result(options, facts, *lines, f"{counted(len(rows), 'record')} of borrowers")


def _places(borrowings: list[Borrowing]) -> str:
    return ", ".join(printable(one.location) for one in borrowings)


def _state(one: Borrowing) -> str:
    return f"{one.state} ({printable(one.why)})" if one.why else one.state


def _show_storage(options: argparse.Namespace) -> int:
    report = report_storage(Store.open(options.store))
    if options.json:
        print_json(asdict(report))
        return EXIT_OK
    rows = [
        tuple(map(size, (row.total, row.delta, row.shared, row.own, row.images)))
        for row in report.versions
    ]
    numbered = [
        (str(entry.version), *row) for entry, row in zip(report.versions, rows, strict=True)
    ]
    print(columns([("version", "total", "delta", "shared", "own", "images"), *numbered]))
    print(f"{size(report.stored)} stored, {size(report.unnamed)} named by no version", end="")
    print(f" ({size(report.condemned)} condemned)" if report.condemned else "")
    if report.borrowed:
        print(f"{size(report.borrowed)} of experts borrowed from other stores, and not stored here")
    if report.deleted:
        print(f"deleted: {', '.join(map(str, report.deleted))}")
    if report.forgotten:
        print(f"forgotten: {counted(report.forgotten, 'shard')} of images")
    return EXIT_OK


def collect(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    report = collect_garbage(store, dry_run=not options.sweep, grace_s=options.grace * 3600)
    if report.unmarked:
        print(
            f"note: the disk is full: {_sum(report.unmarked)} could not be condemned; run it again "
            "when the grace period of the others is over, or with a shorter --grace",
            file=sys.stderr,
        )
    if options.json:
        print_json(_gc_as_json(report))
        return EXIT_OK
    would = "would be " if report.dry_run else ""
    for what, entries in (
        (f"{would}condemned", report.condemned),
        (f"{would}deleted", report.swept),
        (f"{would}deleted (forgotten)", report.forgotten),
    ):
        for entry in entries:
            print(f"{what}: {entry.name} {size(entry.bytes)}")
    if report.lent:
        print(f"kept for stores that borrow (`dne-store borrowers`): {_sum(report.lent)}")
    print(
        f"{_sum(report.reachable)} needed, {_sum(report.condemned)} {would}condemned, "
        f"{_sum(report.waiting)} waiting, "
        f"{_sum((*report.swept, *report.forgotten))} {would}deleted"
    )
    if report.dry_run and (report.condemned or report.swept or report.forgotten):
        print("nothing was changed; --sweep does it")
    return EXIT_OK


def _copy_all(options: argparse.Namespace) -> int:
    keys = _copying_keys(options)
    source = Store.open(options.store)
    target = Store.create(options.to)
    with _bar() as progress:
        report = copy_store(source, target, keys=keys, progress=progress)
    return _tell_copy(report, options, source=options.store, target=options.to)


def _bundle(options: argparse.Namespace) -> int:
    with _bar() as progress:
        made = write_bundle(
            Store.open(options.store), options.out, since=options.since, progress=progress
        )
    after = f" after version {made.since}" if made.since else ""
    said = (
        f"{counted(len(made.versions), 'version')}{after} and {counted(made.shards, 'shard')} are "
        f"in {options.out} ({size(made.bytes)}); `dne-store unbundle` takes them out"
    )
    return show_result(options, {"path": str(options.out), **asdict(made)}, said)


def _unbundle(options: argparse.Namespace) -> int:
    trust = options.trust or os.environ.get("DNE_TRUST")
    keys = Keys(
        signer=load_signer(options.sign) if options.sign else None,
        trust=load_trust(Path(trust)) if trust else None,
    )
    with _bar() as progress:
        report = take_bundle(options.file, options.store, keys=keys, progress=progress)
    return _tell_copy(report, options, source=str(options.file), target=options.store)


def _tell_copy(report: CopyReport, options: argparse.Namespace, *, source: str, target: str) -> int:
    _note_signatures(report, source=source, target=target, signs=bool(options.sign))
    for channel in report.moved_on:
        print(f"note: channel {channel} has moved on in {target}: left alone", file=sys.stderr)
    if report.remembered:
        print(
            f"note: {target} still has {counted(len(report.remembered), 'shard')} of images "
            f"that were forgotten in {source}; `dne-store forget` removes them there",
            file=sys.stderr,
        )
    if options.json:
        print_json(asdict(report))
    else:
        print(
            f"{counted(len(report.versions), 'version')}, {counted(report.shards, 'shard')} "
            f"({size(report.bytes)}) and {counted(report.records, 'channel record')} copied to "
            f"{target}"
            + (f"; {counted(len(report.signed), 'version')} signed for it" if options.sign else "")
        )
    return EXIT_OK


def _copying_keys(options: argparse.Namespace) -> Keys:
    """Read the key and the trust file. Without a trust file the user answers for all versions: this
    is the way to sign a store that has no signatures."""
    if options.sign is None:
        if options.trust is not None:
            raise WrongUsage("--trust says what --sign may sign again: give --sign KEYFILE too")
        return NO_KEYS
    trust = options.trust or os.environ.get("DNE_TRUST")
    return Keys(signer=load_signer(options.sign), trust=load_trust(Path(trust)) if trust else None)


def _note_signatures(report: CopyReport, *, source: str, target: str, signs: bool) -> None:
    """Print what servers that require signatures will refuse in the copy, and the next step."""
    if report.foreign:
        print(
            f"note: {target} has {counted(len(report.foreign), 'version')} signed for another "
            "store, which servers that require signatures refuse; copy to a new store with --sign "
            "KEYFILE to sign for it",
            file=sys.stderr,
        )
    if not signs:
        return
    left = [version for version in report.versions if version not in report.signed]
    if left:
        print(
            "note: not signed, because the gate refused them or they are not trusted in "
            f"{source}: {', '.join(map(str, left))}",
            file=sys.stderr,
        )
    for channel, version in report.unsigned.items():
        print(
            f"note: the newest record of channel {channel} is not signed; `dne-store promote "
            f"{version} --channel {channel} --store {target} --sign KEYFILE --trust FILE` "
            "writes a signed one",
            file=sys.stderr,
        )


@contextmanager
def _bar() -> Iterator[Progress]:
    """Show a bar on stderr while bytes are copied, or a line at the end without a terminal."""
    # Here and not above: no other command needs it or should wait for it.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    shown = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bars(*shown, console=Console(stderr=True)) as bars:
        task = bars.add_task("copy", visible=False)  # until there is something to copy
        yield lambda done, total: bars.update(task, completed=done, total=total, visible=True)


def _gc_as_json(report: GcReport) -> dict[str, object]:
    return {
        "dry_run": report.dry_run,
        "condemned": [entry.name for entry in report.condemned],
        "unmarked": [entry.name for entry in report.unmarked],
        "waiting": [entry.name for entry in report.waiting],
        "deleted": [entry.name for entry in (*report.swept, *report.forgotten)],
        "leftovers": list(report.leftovers),
        "needed_bytes": _bytes(report.reachable),
        "lent_bytes": _bytes(report.lent),
        "condemned_bytes": _bytes(report.condemned),
        "waiting_bytes": _bytes(report.waiting),
        "deleted_bytes": _bytes((*report.swept, *report.forgotten)),
    }


def _sum(entries: Sequence[Entry]) -> str:
    return f"{counted(len(entries), 'shard')} ({size(_bytes(entries))})"


def _bytes(entries: Iterable[Entry]) -> int:
    return sum(entry.bytes for entry in entries)


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not (hours >= 0 and math.isfinite(hours)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours")
    return hours


def add_mend_command(add: Add) -> None:
    mend = add(
        "mend-channel",
        _mend_one,
        help="find what stands in a channel's way and is not a record; with --yes set it aside",
    )
    add_channel_option(mend)
    mend.add_argument(
        "--yes", action="store_true", help="do it (default: only say what would be done)"
    )
    mend.add_argument(
        "--also-valid",
        action="store_true",
        help="set aside records as well that are sound and come after a gap: the channel names "
        "again what it named before the gap",
    )
    add_reason_option(mend, kept="with what is set aside")


def _mend_one(options: argparse.Namespace) -> int:
    with Store.open(options.store).using_reserve() as store:
        report = mend_channel(
            store,
            options.channel,
            mender=Mender(actor=current_actor(), reason=options.reason),
            dry_run=not options.yes,
            also_valid=options.also_valid,
        )
    if options.json:
        print_json(_as_json(report))
        return EXIT_OK
    would = "would be " if report.dry_run else ""
    for stray in report.aside:
        name, why = record_name(report.channel, stray.number), printable(_why(stray))
        print(f"{would}set aside: {name} ({why})")
    for stray in report.left:
        print(f"left: {record_name(report.channel, stray.number)} ({_why(stray)})")
    if report.left:
        print(
            "--also-valid sets sound records aside as well; they may be the rest of a longer "
            "history"
        )
    print(_names(report))
    if report.dry_run and report.aside:
        print("nothing was changed; --yes does it")
    return EXIT_OK


def _why(stray: Stray) -> str:
    if stray.problem:
        return stray.problem
    if stray.record is None:
        return "it may be a record of a later format"
    return f"a sound record of version {stray.record.target}, after a gap"


def _names(report: MendReport) -> str:
    channel = f"channel {report.channel}"
    if report.last and report.head is None and not report.left:
        name = record_name(report.channel, report.last)
        return f"{name} cannot be read; `dne-store promote N` or `rollback --to N` goes on after it"
    if not report.aside and not report.left:
        if not report.last:
            return f"{channel} has no record; `dne-store list` shows the channels that have one"
        return f"{channel} has no gap: nothing stands in its way"
    then = "would name" if report.dry_run and report.aside else "names"
    if report.head is not None:
        return f"{channel} {then} version {report.head.target} (record {report.head.number})"
    return f"{channel} {then} no version that can be read; promote one"


def _as_json(report: MendReport) -> dict[str, object]:
    return {
        "channel": report.channel,
        "dry_run": report.dry_run,
        "target": report.head.target if report.head else None,
        "number": report.head.number if report.head else None,
        "set_aside": [{"number": stray.number, "problem": _why(stray)} for stray in report.aside],
        "left": [{"number": stray.number, "problem": _why(stray)} for stray in report.left],
    }
