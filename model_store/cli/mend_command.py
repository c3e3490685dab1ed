"""Run `dne-store mend-channel`: show the objects in a channel's way, and set them aside."""

from __future__ import annotations

import argparse

from model_store.cli.command import (
    EXIT_OK,
    Add,
    add_channel_option,
    add_reason_option,
    current_actor,
    print_json,
)
from model_store.layout import record_name
from model_store.maintenance.mend import Mender, MendReport, Stray, mend_channel
from model_store.store.store import Store
from model_store.tables import printable


def add_mend_command(add: Add) -> None:
    mend = add(
        "mend-channel",
        mend_one,
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


def mend_one(options: argparse.Namespace) -> int:
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
        print("--also-valid sets sound records aside as well; they may be what is left of more")
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
        "set_aside": [{"number": one.number, "problem": _why(one)} for one in report.aside],
        "left": [{"number": one.number, "problem": _why(one)} for one in report.left],
    }
