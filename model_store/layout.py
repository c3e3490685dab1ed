"""Build and parse the names of the objects in a store."""

from __future__ import annotations

import re

STORE = "store.json"
SHARDS = "shards"
VERSIONS = "versions"
CHANNELS = "channels"
DELETED = "deleted"
FORGOTTEN = "forgotten"
RUNS = "runs"
CONDEMNED = "condemned"
CLOCK = "clock"
MENDED = "mended"
BORROWERS = "borrowers"
RESERVE = "reserve"
TMP = "tmp"
INBOX = "inbox"
JOBS = "jobs"
_ADVICE = "advice"
ITEM_ID = r"[0-9]{8}t[0-9]{9}-[0-9a-f]{12}"
"""The form of an item's id; `model_store.loop.item_names` has the names of its objects."""

# ASCII digits, and `fullmatch` below: `\d` and `$` let through more than is meant.
_SHARD = re.compile(r"shards/([0-9a-f]{2})/(\1[0-9a-f]{62})\.safetensors")
_VERSION = re.compile(r"versions/([0-9]{8})\.json")
_RECORD = re.compile(r"channels/([a-z0-9][a-z0-9_-]{0,62})/([0-9]{8})\.json")
_DELETED = re.compile(r"deleted/([0-9]{8})\.json")
_FORGOTTEN = re.compile(r"forgotten/([0-9a-f]{64})\.json")
_HEARTBEAT = re.compile(
    rf"jobs/{ITEM_ID}/(beat\.[0-9]{{8}}|doubt\.[0-9]{{8}}\.[0-9]{{8}})\.[0-9a-f]{{8,32}}\.json"
)
_BORROWER = re.compile(r"borrowers/([0-9a-f]{32})\.[0-9a-f]{32}\.json")
_RUN = re.compile(r"runs/([0-9a-f]{32})(?:-([0-9]{1,4}))?\.json")


def shard_name(sha256: str) -> str:
    return f"{SHARDS}/{sha256[:2]}/{sha256}.safetensors"


def version_name(version: int) -> str:
    return f"{VERSIONS}/{version:08d}.json"


def record_name(channel: str, number: int) -> str:
    return f"{CHANNELS}/{channel}/{number:08d}.json"


def deleted_name(version: int) -> str:
    return f"{DELETED}/{version:08d}.json"


def forgotten_name(sha256: str) -> str:
    return f"{FORGOTTEN}/{sha256}.json"


def run_name(transaction: str, number: int) -> str:
    """Name an announcement. A run may announce itself several times, then with a number."""
    return f"{RUNS}/{transaction}.json" if number == 1 else f"{RUNS}/{transaction}-{number}.json"


def advice_name(version: int) -> str:
    return f"{_ADVICE}/{version:08d}.json"


def mended_name(channel: str, number: int, attempt: int) -> str:
    return f"{MENDED}/{channel}/{number:08d}.{attempt}.json"


def shard_of(name: str) -> str | None:
    """Return the SHA-256 in the name of a shard."""
    match = _SHARD.fullmatch(name)
    return match[2] if match else None


def version_of(name: str) -> int | None:
    """Return the number in the name of a manifest."""
    match = _VERSION.fullmatch(name)
    return int(match[1]) or None if match else None


def record_of(name: str) -> tuple[str, int] | None:
    """Return channel and number in the name of a channel record."""
    match = _RECORD.fullmatch(name)
    return (match[1], int(match[2])) if match and int(match[2]) else None


def deleted_of(name: str) -> int | None:
    """Return the version in the name of a tombstone."""
    match = _DELETED.fullmatch(name)
    return int(match[1]) or None if match else None


def forgotten_of(name: str) -> str | None:
    """Return the SHA-256 in the name of a tombstone of images."""
    match = _FORGOTTEN.fullmatch(name)
    return match[1] if match else None


def run_of(name: str) -> str | None:
    """Return the transaction in the name of an announcement."""
    match = _RUN.fullmatch(name)
    return match[1] if match else None


def borrower_of(name: str) -> str | None:
    """Return the id of the store in the name of a borrower's record."""
    match = _BORROWER.fullmatch(name)
    return match[1] if match else None


def is_heartbeat(name: str) -> bool:
    """Return whether this names a heartbeat or a doubt, which matter only while a job runs."""
    return _HEARTBEAT.fullmatch(name) is not None
