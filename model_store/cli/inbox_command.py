"""Run `dne-store inbox` and `relabel`: look at pictures that servers have kept, label and export
them; correct images that versions keep."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from model_store.cli.command import (
    EXIT_OK,
    Add,
    Subparsers,
    add_channel_option,
    add_reason_option,
    adder,
    current_actor,
    open_head,
    print_json,
    show_result,
)
from model_store.errors import WrongUsage
from model_store.loop.corrections import correct, find_corrections, image_named
from model_store.loop.describe import describe_correction, describe_item, describe_label
from model_store.loop.inbox import CLEAR, DISCARD, WRONG, Inbox, Judgement
from model_store.loop.index import STATES, Index, Order
from model_store.loop.items import Item, open_index, read_items
from model_store.loop.waiting import export_labelled
from model_store.records.inbox import CorrectionRecord, LabelRecord
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from model_store.tables import columns, counted, percent, printable, size

ABOUT = "look at pictures that servers have kept; label, discard and export them"
DEFAULT_LISTED = 50
MAX_LISTED = 1000


def add_inbox_command(commands: Subparsers) -> None:
    inbox = commands.add_parser("inbox", help=ABOUT, description=ABOUT)
    subparsers = inbox.add_subparsers(title="commands", required=True, metavar="COMMAND")

    add = adder(subparsers)
    _add_list(add("list", _list_items, help="list items, a page at a time"))
    show = add("show", show_item, help="show an item, its answer and its labels")
    show.add_argument("id", metavar="ID", help="the item")
    label = add("label", label_items, help="say of which class pictures are")
    label.add_argument(
        "pairs", metavar="ID LABEL", nargs="+", help="an item and its class; several pairs"
    )
    for name, judgement, help in (
        ("wrong", WRONG, "say that answers are wrong, without naming a class"),
        ("discard", DISCARD, "say that pictures are of no use"),
        ("clear", CLEAR, "take the newest label, or discard, of items back"),
    ):
        judging = add(name, _judge_items, help=help)
        judging.add_argument("ids", metavar="ID", nargs="+", help="the items")
        judging.set_defaults(judgement=judgement)
    delete = add(
        "delete", _delete_all, help="delete items with their pictures; nothing of them stays"
    )
    delete.add_argument("ids", metavar="ID", nargs="+", help="the items")
    export = add("export", _export_items, help="write labelled pictures as one folder a class")
    export.add_argument(
        "--out", metavar="DIR", type=Path, required=True, help="a folder that is new or empty"
    )


def add_relabel_command(add: Add) -> None:
    relabel = add(
        "relabel",
        _relabel,
        help="move an image that versions keep to another class, or take it out; list what waits",
    )
    relabel.add_argument(
        "image",
        metavar="IMAGE",
        nargs="?",
        help="as the advice and the report name it: 'exemplar 32 of starfish' or 'held-out image 3 "
        "of starfish'; without it, list the corrections that the next version learns",
    )
    goal = relabel.add_mutually_exclusive_group()
    goal.add_argument(
        "--to", metavar="NAME", help="the class that it is of; its own one takes back what was said"
    )
    goal.add_argument("--out", action="store_true", help="it is of no use: take it out")
    add_channel_option(relabel)
    add_reason_option(relabel, kept="with the correction")


def _relabel(options: argparse.Namespace) -> int:
    store, manifest = open_head(options)
    if options.image is None:
        if options.to is not None or options.out:
            raise WrongUsage("name the image that --to or --out is about")
        return _list_corrections(store, manifest, as_json=options.json)
    if options.to is None and not options.out:
        raise WrongUsage("say --to NAME, or --out")
    kept = image_named(store, manifest, options.image)
    record = correct(
        store,
        manifest,
        image=kept.sha256,
        label=kept.entry.class_name,
        to=options.to,
        actor=current_actor(),
        reason=options.reason,
    )
    if options.json:
        print_json(describe_correction(record))
        return EXIT_OK
    print(f"{printable(kept.name)}: {_goal_of(record)}")
    print("`dne-train add-task --from-inbox`, or Learn on the page /label, learns it")
    return EXIT_OK


def _list_corrections(store: Store, manifest: Manifest, *, as_json: bool) -> int:
    found = find_corrections(store, manifest)
    told = [(move.record, move.label, "") for move in found.waiting]
    told += [(record, record.label, why) for record, why in found.left]
    if as_json:
        rows = [
            {**describe_correction(record), "label": label, "why": why or None}
            for record, label, why in told
        ]
        print_json({"version": manifest.version, "corrections": rows})
        return EXIT_OK
    if told:
        table = [
            (record.image[:12], label, _goal_of(record), record.actor, record.reason, why)
            for record, label, why in told
        ]
        print(columns([("image", "class", "correction", "who", "reason", "left because"), *table]))
    print(f"{counted(len(found.waiting), 'correction')} for the version after {manifest.version}")
    return EXIT_OK


def _goal_of(record: CorrectionRecord) -> str:
    if record.to is None:
        return "taken out"
    return "stays" if record.to == record.label else f"is {printable(record.to)}"


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--order",
        choices=get_args(Order),
        default="newest",
        help="newest, least certain (uncertain), unknown or disagreeing first "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--state",
        choices=STATES,
        action="append",
        help="only items in this state; may be given several times (default: all)",
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=_limit,
        default=DEFAULT_LISTED,
        help=f"items in a page, at most {MAX_LISTED} (default: %(default)s)",
    )
    parser.add_argument(
        "--cursor", metavar="C", help="go on after a page: its next_cursor (default: the beginning)"
    )


def _list_items(options: argparse.Namespace) -> int:
    inbox, index = _open(options)
    page = index.page(
        order=options.order,
        states=options.state or STATES,
        cursor=options.cursor,
        limit=options.limit,
    )
    items = list(read_items(inbox, page.rows))
    if options.json:
        print_json(
            {
                "items": [describe_item(item) for item in items],
                "counts": index.counts(),
                "total": len(index),
                "next_cursor": page.next_cursor,
            }
        )
        return EXIT_OK
    if items:
        print(columns([("item", "answer", "score", "unknown", "rules", "label"), *_rows(items)]))
    counts = ", ".join(f"{count} {state}" for state, count in index.counts().items())
    print(f"{counted(len(index), 'item')}: {counts}")
    if page.next_cursor:
        print(f"more: --cursor {page.next_cursor}")
    return EXIT_OK


def show_item(options: argparse.Namespace) -> int:
    inbox = Inbox(Store.open(options.store).objects)
    record, history = inbox.item(options.id), inbox.history(options.id)
    item = Item(record=record, head=history[-1] if history else None)
    labels = [describe_label(record) for record in history]
    if options.json:
        print_json({**describe_item(item), "history": labels})
        return EXIT_OK
    picture = record.picture
    fields = [
        ("item", record.id),
        ("time", record.time),
        ("version", str(record.version or "-")),
        (
            "answer",
            ", ".join(f"{top_class.label} {percent(top_class.score)}" for top_class in record.top)
            or "-",
        ),
        ("unknown", f"{'yes' if record.unknown else 'no'} ({percent(record.unknown_score)})"),
        ("other answer", record.other_label or "-"),
        ("rules", ", ".join(record.rules)),
        ("picture", f"{picture.width}×{picture.height}, {picture.type}, {size(picture.bytes)}"),
    ]
    print(columns(fields))
    if history:
        rows = [
            (str(record.number), _said(record), record.actor, record.time) for record in history
        ]
        print("\n" + columns([("record", "label", "who", "when"), *rows]))
    return EXIT_OK


def label_items(options: argparse.Namespace) -> int:
    words: Sequence[str] = options.pairs
    if len(words) % 2:
        raise WrongUsage(f"{words[-1]!r} has no label: write ID LABEL, and then the next pair")
    pairs = zip(words[::2], words[1::2], strict=True)
    return _judge(options, [(item, Judgement.of_class(label)) for item, label in pairs])


def _judge_items(options: argparse.Namespace) -> int:
    """Run `wrong`, `discard` and `clear`."""
    return _judge(options, [(item, options.judgement) for item in options.ids])


def _delete_all(options: argparse.Namespace) -> int:
    inbox = Inbox(Store.open(options.store).objects)
    for item in options.ids:
        inbox.item(item)
    for item in options.ids:
        inbox.delete(item)
    said = f"{counted(len(options.ids), 'item')} deleted, with pictures and labels"
    return show_result(options, {"deleted": list(options.ids)}, said)


def _export_items(options: argparse.Namespace) -> int:
    inbox, index = _open(options)
    exported = export_labelled(inbox, index, out=options.out)
    counts = {name: len(pictures) for name, pictures in exported.classes.items()}
    facts = {"out": str(options.out), "classes": counts, "items": exported.numbers}
    lines = [f"{counted(count, 'picture')} of {printable(name)}" for name, count in counts.items()]
    return show_result(
        options, facts, *lines, f"`dne-train add-task --data {options.out}` learns them"
    )


def _judge(options: argparse.Namespace, judgements: Sequence[tuple[str, Judgement]]) -> int:
    """Append a record to each item, once all of them are known to be there."""
    inbox = Inbox(Store.open(options.store).objects)
    for item, _ in judgements:
        inbox.item(item)
    actor = current_actor()
    records = [inbox.judge(item, judgement, actor=actor) for item, judgement in judgements]
    facts = {"items": [{"id": record.item, **describe_label(record)} for record in records]}
    lines = (f"{made.item}: {printable(_said(made))} (record {made.number})" for made in records)
    return show_result(options, facts, *lines)


def _open(options: argparse.Namespace) -> tuple[Inbox, Index]:
    inbox = Inbox(Store.open(options.store).objects)
    return inbox, open_index(inbox)


def _rows(items: Sequence[Item]) -> list[tuple[str, ...]]:
    return [
        (
            item.record.id,
            item.record.answer.label if item.record.answer else "-",
            percent(item.record.answer.score if item.record.answer else None),
            "unknown" if item.record.unknown else "-",
            ",".join(item.record.rules),
            _said(item.head) if item.head else "-",
        )
        for item in items
    ]


def _said(record: LabelRecord) -> str:
    return record.label if record.label is not None else f"({record.kind})"


def _limit(text: str) -> Any:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else 0
    if not 1 <= number <= MAX_LISTED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_LISTED}")
    return number
