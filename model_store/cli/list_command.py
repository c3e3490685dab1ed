"""Run `dne-store list`: show the newest versions, their verdicts and the channels' targets."""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_store import __version__
from model_store.cli.command import EXIT_FAILED, EXIT_OK, print_json, version_number
from model_store.errors import NotPrivate, StoreError
from model_store.host.private import private_folder, read_private, replace_file
from model_store.records import describe
from model_store.records.channel import ChannelRecord
from model_store.records.describe import channel_head, summary
from model_store.records.manifest import Manifest
from model_store.store.cache import cache_folder
from model_store.store.store import Store
from model_store.store.summaries import MAX_KEPT_BYTES, Keep, Key, Page, Row, read_page
from model_store.tables import columns, percent, size

FOLDER = "summaries"
MAX_FILES = 16
MAX_FILE_BYTES = 3 * MAX_KEPT_BYTES  # names and numbers stand beside the rows

log = logging.getLogger("model_store.kept_rows")

_OWN_NAME = re.compile(r"[0-9a-f]{32}\.rows|tmp-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowFile:
    """The rows of one store on disk. `stamp` changes with the code that makes rows: rows of other
    code are not taken."""

    path: Path
    store: str
    stamp: str

    def load(self, keep: Keep) -> None:
        """Load the rows that an earlier run has kept, if their seal fits."""
        try:
            content = read_private(self.path, max_bytes=MAX_FILE_BYTES)
        except (OSError, NotPrivate):
            return
        seal, _, content = content.partition(b"\n")
        if seal.decode(errors="replace") != self._seal(content):
            return
        for line in content.splitlines():
            name, size, modified_s, value = line.split(b"\t", 3)
            key = Key(self.store, name.decode(), int(size), float(modified_s))
            keep.put(key, value)

    def save(self, keep: Keep) -> None:
        """Keep the rows for the next run. A cache that cannot be written costs only time."""
        content = b"\n".join(
            b"%s\t%d\t%s\t%s" % (key.name.encode(), key.bytes, repr(key.modified_s).encode(), value)
            for key, value in keep.items()
        )
        try:
            private_folder(self.path.parent)
            _make_room(self.path.parent, besides=self.path.name)
            replace_file(self.path, self._seal(content).encode() + b"\n" + content)
        except (OSError, NotPrivate) as error:
            log.debug("the rows of the list are not kept in %s: %s", self.path, error)

    def _seal(self, content: bytes) -> str:
        """Hash the rows and the stamp of the code that made them."""
        return hashlib.sha256(self.stamp.encode() + b"\n" + content).hexdigest()


def _make_room(folder: Path, *, besides: str) -> None:
    """Remove the files of stores that were listed longest ago."""
    with os.scandir(folder) as items:
        held = [
            (item.stat(follow_symlinks=False).st_mtime, item.path)
            for item in items
            if _OWN_NAME.fullmatch(item.name)
            and item.name != besides
            and item.is_file(follow_symlinks=False)
        ]
    for _, path in sorted(held)[: max(0, len(held) - MAX_FILES + 1)]:
        with suppress(FileNotFoundError):
            os.unlink(path)


SHOWN = 30
_CHANGE_WIDTH = 32
_WORTH_A_FILE = 100
"""Rows of this many versions and more are kept on disk; fewer are quick to read."""

_TITLES = (
    *("version", "parent", "created", "what", "tasks", "classes", "accuracy", "gate", "delta"),
    "served as",
)


def add_list_options(parser: argparse.ArgumentParser) -> None:
    many = parser.add_mutually_exclusive_group()
    many.add_argument(
        "--limit",
        metavar="N",
        type=version_number,
        help=f"show the newest N versions (default: {SHOWN}; with --json, all)",
    )
    many.add_argument("--all", action="store_true", help="show every version")
    parser.add_argument(
        "--before",
        metavar="N",
        type=version_number,
        help="show only versions with a smaller number than N",
    )


def list_versions(options: argparse.Namespace) -> int:
    store = Store.open(options.store)
    page = _read(store, before=options.before, limit=_limit(options))
    problems = [str(problem) for problem in page.problems]
    heads = _heads(store, problems)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    rows = [row for _, row in page.rows if not isinstance(row, StoreError)]
    if options.json:
        channels = {channel: channel_head(head) for channel, head in heads.items()}
        print_json(
            {
                "versions": rows,
                "channels": channels,
                "problems": problems,
                "total": page.total,
                "next_before": page.next_before,
            }
        )
    else:
        if rows:
            print(columns([_TITLES, *(_cells(row, heads) for row in rows)]))
        _print_rest(page)
    return EXIT_FAILED if problems else EXIT_OK


def _limit(options: argparse.Namespace) -> int | None:
    if options.limit is not None:
        limit: int = options.limit
        return limit
    # Scripts read the JSON: a list that silently left versions out would mislead them.
    return None if options.all or options.json else SHOWN


def _read(store: Store, *, before: int | None, limit: int | None) -> Page:
    keep = Keep()
    kept = _kept(store) if limit is None or limit >= _WORTH_A_FILE else None
    if kept is not None:
        kept.load(keep)
    known = len(keep)
    page = read_page(store, describe=_row, keep=keep, before=before, limit=limit)
    if kept is not None and len(keep) - known >= _WORTH_A_FILE:
        kept.save(keep)
    return page


def _row(manifest: Manifest, base: Manifest | None) -> Row:
    return summary(manifest, parent=base)


def _kept(store: Store) -> _RowFile | None:
    """Find the file with the rows of this store; None where our own code cannot be read, because
    rows must carry a stamp of the code that made them."""
    try:
        code = [Path(str(path)).read_bytes() for path in (describe.__file__, __file__)]
    except OSError:
        return None
    stamp = f"{__version__} {hashlib.sha256(b''.join(code)).hexdigest()}"
    place = store.location if "://" in store.location else os.path.abspath(store.location)
    which = hashlib.sha256(f"{store.id} {place}".encode()).hexdigest()[:32]
    return _RowFile(path=cache_folder() / FOLDER / f"{which}.rows", store=store.id, stamp=stamp)


def _heads(store: Store, problems: list[str]) -> dict[str, ChannelRecord]:
    heads: dict[str, ChannelRecord] = {}
    for channel, number in store.newest_records().items():
        try:
            heads[channel] = store.record(channel, number)
        except StoreError as error:
            problems.append(str(error))
    return heads


def _print_rest(page: Page) -> None:
    """Print how many versions the table leaves out, and how to see them."""
    shown = len(page.rows)
    if not page.total:
        print("the store is empty; `dne-train add-task` makes the first version")
    elif not shown:
        print(f"none of the {page.total} versions has a smaller number")
    elif page.next_before is not None:
        print(
            f"{shown} of {page.total} versions; `dne-store list --before {page.next_before}` "
            "shows older ones, `--all` every one"
        )


def _cells(row: Row, heads: dict[str, ChannelRecord]) -> tuple[str, ...]:
    change, named = (
        row["change"],
        [head for head in heads.values() if head.target == row["version"]],
    )
    return (
        str(row["version"]),
        str(row["parent"] or "-"),
        row["created"][:19].replace("T", " "),
        change if len(change) <= _CHANGE_WIDTH else f"{change[: _CHANGE_WIDTH - 1]}…",
        str(row["tasks"]),
        str(row["classes"]),
        percent(row["accuracy"]["all"]),
        _mark(row),
        size(row["delta_bytes"]),
        ", ".join(f"{head.channel} ({head.mode})" for head in named),
    )


def _mark(row: dict[str, Any]) -> str:
    """Write the gate's verdict without its reasons. A version that did not pass gets a mark."""
    word = str(row["gate"])
    return f"! {word}" if word in ("refused", "overruled") else word
