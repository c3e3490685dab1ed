"""Run `dne-store promote`, `rollback`, `resume` and `history`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from model_store.cli.command import (
    EXIT_FAILED,
    EXIT_OK,
    Add,
    add_channel_option,
    add_key_options,
    add_reason_option,
    add_version_argument,
    current_actor,
    print_json,
    read_keys,
    show_result,
    version_number,
)
from model_store.errors import ChannelNotFound, ShardCorrupt, ShardMissing, StoreError
from model_store.records.channel import ChannelRecord
from model_store.records.describe import channel_move
from model_store.store.store import Store
from model_store.tables import columns, printable

SHOWN = 30
_RECORD_TITLES = ("record", "time", "version", "mode", "who", "why", "key")
_SHOWN_OF_KEY = 12


def add_channel_commands(add: Add) -> None:
    promote = add("promote", _promote_version, help="let a channel name a version and follow on")
    add_version_argument(promote)
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
    resume = add("resume", _resume_channel, help="end a rollback: name the followed version again")
    for subparser in (promote, rollback, resume):
        add_channel_option(subparser)
        add_key_options(subparser)
        add_reason_option(subparser, kept="in the channel's history")
    history = add("history", _show_history, help="list who moved a channel where, when and why")
    add_channel_option(history)
    history.add_argument(
        "--limit",
        metavar="N",
        type=version_number,
        help=f"show the newest N records (default: {SHOWN}; with --json, all)",
    )


def _promote_version(options: argparse.Namespace) -> int:
    store = Store.open(options.store, keys=read_keys(options))
    if options.verify:  # starting servers must be able to load the version
        from model_store.store.verify import check_servable  # other commands start without it

        try:
            check_servable(store, store.manifest(options.number))
        except (ShardMissing, ShardCorrupt) as error:
            raise StoreError(
                f"version {options.number} was not promoted: {error}; `dne-store verify "
                f"{options.number}` names everything that is damaged, and --no-verify promotes it "
                "all the same"
            ) from error
    return _tell_move(store, store.promote(options.number, **_move(options)), options)


def roll_back(options: argparse.Namespace) -> int:
    store = Store.open(options.store, keys=read_keys(options))
    return _tell_move(store, store.rollback(to=options.to, **_move(options)), options)


def _resume_channel(options: argparse.Namespace) -> int:
    store = Store.open(options.store, keys=read_keys(options))
    return _tell_move(store, store.resume(**_move(options)), options)


def _show_history(options: argparse.Namespace) -> int:
    """List the records of a channel, newest last. A damaged record does not hide the others."""
    store = Store.open(options.store)
    numbers = store.record_numbers(options.channel)
    if not numbers:
        raise ChannelNotFound(f"channel {options.channel} has no records: nothing was promoted yet")
    limit = options.limit or (None if options.json else SHOWN)
    records: list[ChannelRecord] = []
    problems: list[str] = []
    for number in numbers[-limit:] if limit else numbers:
        try:
            records.append(store.record(options.channel, number))
        except StoreError as error:
            problems.append(str(error))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if options.json:
        told = [record.model_dump(exclude={"format"}) for record in records]
        print_json(
            {
                "channel": options.channel,
                "total": len(numbers),
                "records": told,
                "problems": problems,
            }
        )
    else:
        rows = [_RECORD_TITLES, *map(_record_cells, records)]
        any_signed = any(record.signature for record in records)
        print(columns(rows if any_signed else [row[:-1] for row in rows]))
        if limit and len(numbers) > limit:
            print(f"the newest {limit} of {len(numbers)} records; --limit shows more")
    return EXIT_FAILED if problems else EXIT_OK


def _record_cells(record: ChannelRecord) -> tuple[str, ...]:
    return (
        str(record.number),
        record.time[:19].replace("T", " "),
        str(record.target),
        record.mode,
        record.actor,
        record.reason or "-",
        record.signature.key[:_SHOWN_OF_KEY] if record.signature else "-",
    )


def _move(options: argparse.Namespace) -> dict[str, Any]:
    return {"channel": options.channel, "actor": current_actor(), "reason": options.reason}


def _tell_move(store: Store, record: ChannelRecord, options: argparse.Namespace) -> int:
    previous = _previous_target(store, record)
    before = {None: "before: nothing", record.target: "it did so before"}
    said = f"channel {record.channel} names version {record.target} ({record.mode}); "
    lines = [said + before.get(previous, f"before: version {previous}")]
    if record.reason:
        lines.append(f"reason: {printable(record.reason)}")
    return show_result(options, channel_move(record, previous=previous), *lines)


def _previous_target(store: Store, record: ChannelRecord) -> int | None:
    if record.number == 1:
        return None
    try:
        return store.record(record.channel, record.number - 1).target
    except StoreError:
        return None  # damaged, and no reason to hide that the new record was written
