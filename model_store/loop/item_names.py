"""Build and parse the names of the inbox's objects.

The name of a picture holds the facts by which items are sorted and compared. So one listing of
names describes 100,000 items, without reading a record.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from model_store.layout import INBOX, ITEM_ID

if TYPE_CHECKING:
    from model_store.records.inbox import ItemRecord

ITEMS = f"{INBOX}/items"
PICTURES = f"{INBOX}/pictures"
LABELS = f"{INBOX}/labels"
USED = f"{INBOX}/used"
REMOVED = f"{INBOX}/removed"
CORRECTIONS = f"{INBOX}/corrections"
MILLE = 1000
NOT_KNOWN = "xxxx"
EXTENSIONS = {"image/jpeg": "jpg", "image/png": "png"}

_PICTURE = re.compile(
    rf"({ITEM_ID})\.([01][0-9]{{3}})\.([01][0-9]{{3}}|{NOT_KNOWN})\.([dou]{{1,2}})\.([0-9a-f]{{16}})"
    r"\.(jpg|png)"
)
_LABEL = re.compile(rf"{LABELS}/[0-9]{{8}}/({ITEM_ID})\.([0-9]{{8}})\.json")
_ITEM = re.compile(rf"{ITEMS}/[0-9]{{8}}/({ITEM_ID})\.json")
_REMOVED = re.compile(rf"{REMOVED}/[0-9]{{8}}/({ITEM_ID})")
_CORRECTION = re.compile(rf"{CORRECTIONS}/({ITEM_ID})\.json")
_USED = re.compile(rf"{USED}/([0-9]{{8}})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts in the name of a picture. Scores are in thousandths."""

    id: str
    score: int
    unknown_score: int | None
    is_unknown: bool
    disagrees: bool
    dhash: int


def new_id(now: datetime | None = None) -> str:
    """Make the id of an item. Ids sort by time."""
    at = now or datetime.now(UTC)
    # Every answer of a collecting server has an id, and `strftime` takes twice as long.
    return (
        f"{at.year:04d}{at.month:02d}{at.day:02d}t{at.hour:02d}{at.minute:02d}{at.second:02d}"
        f"{at.microsecond // 1000:03d}-{secrets.token_hex(6)}"
    )


def is_id(text: str) -> bool:
    return re.fullmatch(ITEM_ID, text) is not None


def time_of(item: str) -> datetime:
    """Return the time in an id; the earliest time if its digits are not a time."""
    try:
        return datetime.strptime(f"{item[:18]}000", "%Y%m%dt%H%M%S%f").replace(tzinfo=UTC)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)


def timestamp_of(item: str) -> str:
    """Write the time in an id as records have it."""
    day, clock = item[:8], item[9:15]
    return f"{day[:4]}-{day[4:6]}-{day[6:]}T{clock[:2]}:{clock[2:4]}:{clock[4:]}.{item[15:18]}000Z"


def ids_before(moment: datetime) -> str:
    """Return a text that sorts after all ids of an earlier time, and before all others."""
    return f"{moment:%Y%m%dt%H%M%S}{moment.microsecond // 1000:03d}"


def days_since(item: str, *, now: datetime) -> list[str]:
    """List the folders of days from the day of an item to tomorrow: clocks differ."""
    first = max(time_of(item).date(), (now - timedelta(days=1)).date())
    last = (now + timedelta(days=1)).date()
    return [f"{first + timedelta(days=n):%Y%m%d}" for n in range((last - first).days + 1)]


def item_name(item: str) -> str:
    return f"{ITEMS}/{item[:8]}/{item}.json"


def label_name(item: str, number: int) -> str:
    return f"{LABELS}/{item[:8]}/{item}.{number:08d}.json"


def removed_name(item: str) -> str:
    """Name the mark of a deleted item, which is an empty object."""
    return f"{REMOVED}/{item[:8]}/{item}"


def used_name(version: int) -> str:
    return f"{USED}/{version:08d}.json"


def picture_name(item: ItemRecord) -> str:
    """Name the picture of an item, with the facts."""
    unknown = NOT_KNOWN if item.unknown_score is None else f"{_mille(item.unknown_score):04d}"
    score = item.answer.score if item.answer else 0.0
    flags = "u" * item.unknown + "d" * (item.other_label is not None) or "o"
    return (
        f"{PICTURES}/{item.id[:8]}/{item.id}.{_mille(score):04d}.{unknown}.{flags}."
        f"{item.picture.dhash}.{EXTENSIONS[item.picture.type]}"
    )


def short_of(name: str) -> str | None:
    """Return the last part of the name of a picture; None for any other name."""
    short = name.rpartition("/")[2]
    match = _PICTURE.fullmatch(short)
    return short if match and name == f"{PICTURES}/{match[1][:8]}/{short}" else None


def facts_of(short: str) -> Facts:
    """Read the facts in the last part of the name of a picture."""
    item, score, unknown, flags, dhash, _ = short.split(".")
    return Facts(
        id=item,
        score=int(score),
        unknown_score=None if unknown == NOT_KNOWN else int(unknown),
        is_unknown="u" in flags,
        disagrees="d" in flags,
        dhash=int(dhash, 16),
    )


def item_of(name: str) -> str | None:
    """Return the id in the name of an item record; None for any other name."""
    match = _ITEM.fullmatch(name)
    return match[1] if match else None


def label_of(name: str) -> tuple[str, int] | None:
    """Return item and number in the name of a label record; None for any other name."""
    match = _LABEL.fullmatch(name)
    return (match[1], int(match[2])) if match and int(match[2]) else None


def removed_of(name: str) -> str | None:
    """Return the id in the name of a mark of a deleted item; None for any other name."""
    match = _REMOVED.fullmatch(name)
    return match[1] if match else None


def correction_name(correction: str) -> str:
    return f"{CORRECTIONS}/{correction}.json"


def correction_of(name: str) -> str | None:
    """Return the id in the name of a correction; None for any other name."""
    match = _CORRECTION.fullmatch(name)
    return match[1] if match else None


def used_of(name: str) -> int | None:
    """Return the version in the name of a record of use; None for any other name."""
    match = _USED.fullmatch(name)
    return int(match[1]) or None if match else None


def _mille(share: float) -> int:
    return round(share * MILLE)
