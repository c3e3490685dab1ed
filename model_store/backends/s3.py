"""Keep objects in S3, Google Cloud Storage or Azure, through obstore.

A reply can be lost, a request repeated by the client, a conflict reported although nothing was
written. So every answer but success is followed by reading the object, and its bytes decide.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from os import environ
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from model_store.backends.base import Entry, ObjectMissing, ObjectRefused, check_object_name
from model_store.errors import OutcomeUnknown, StoreError, StoreUnsupported, WriteFailed, WrongUsage
from model_store.layout import STORE

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_LOCATION = re.compile(r"(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_.-]+)*/?")
_TOOK = re.compile(r" in [0-9.]+(?:s|ms|µs|ns)\b(?:, after \d+ retries[^-]*(?= -))?")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

SMALL_BYTES = 16 << 20  # every record is at most that large
_SMALL_TIMEOUT = timedelta(seconds=30)
_LARGE_TIMEOUT = timedelta(minutes=30)
"""The time for a whole request with its body: large objects need more of it."""

_CONFLICT_PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses between attempts to write where a conflict is reported and nothing is there (S3's 409)."""

RETRY: RetryConfig = {
    "max_retries": 100,  # the time decides: pauses are random, and eight of them can end in 3 s
    "retry_timeout": timedelta(seconds=20),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=3),
        "base": 2,
    },
}

_FAILURES = (BaseError, OSError)  # obstore says FileNotFoundError where nothing is there
_TAKEN = (AlreadyExistsError, PreconditionError)  # Azure says the latter
_REFUSED = (PermissionDeniedError, UnauthenticatedError, NotSupportedError, FileNotFoundError)


class ObjectStorage:
    """Objects below one prefix of a bucket. Safe to use from several threads."""

    def __init__(self, location: str, *, retry: RetryConfig = RETRY) -> None:
        bucket, self._prefix = _split(location)
        self._small = _connected(bucket, timeout=_SMALL_TIMEOUT, retry=retry)
        self._large = _connected(bucket, timeout=_LARGE_TIMEOUT, retry=retry)
        self._proved = False

    def create(self, name: str, data: bytes) -> bool:
        """Create an object as `Objects.create` promises. Equal bytes are ours: every record holds a
        random id of its write, and the writer of a shard does not matter."""
        check_object_name(name)
        self._prove()
        for pause_s in _CONFLICT_PAUSES_S:
            time.sleep(pause_s)
            try:
                obstore.put(self._for(len(data)), self._prefix + name, data, mode="create")
                return True
            except _FAILURES as error:
                failure = error
            held = self._read_back(name, data, failure=failure)
            if held is not None:
                return held == data
            if not isinstance(failure, _TAKEN):
                break  # obstore has tried it again and again already
        if isinstance(failure, _REFUSED):
            raise WriteFailed(f"{name} could not be written: {_sentence(failure)}") from failure
        # It is not there now, but a request that went astray may still arrive.
        raise _unknown(name, failure) from failure

    def read(self, name: str, *, max_bytes: int) -> bytes:
        check_object_name(name)
        with _explained(f"{name} could not be read"):
            try:
                answer = obstore.get(self._for(max_bytes), self._prefix + name)
                size = answer.meta["size"]
                if size > max_bytes:
                    raise ObjectRefused(name, f"it has {size} bytes instead of at most {max_bytes}")
                return bytes(answer.bytes())
            except FileNotFoundError as error:
                raise ObjectMissing(name) from error

    def list(self, folder: str, *, after: str = "") -> Sequence[Entry]:
        check_object_name(folder)
        offset = self._prefix + after if after else None
        with _explained(f"{folder} could not be listed"):
            listed = obstore.list(
                self._small, prefix=self._prefix + folder, offset=offset
            ).collect()
        entries = (
            Entry(
                name=meta["path"].removeprefix(self._prefix),
                bytes=meta["size"],
                modified_s=meta["last_modified"].timestamp(),
            )
            for meta in listed
        )
        return tuple(one for one in entries if _is_object_name(one.name) and one.name > after)

    def list_names(self, folder: str) -> Sequence[str]:
        return tuple(entry.name for entry in self.list(folder))

    def delete(self, name: str) -> None:
        check_object_name(name)
        try:
            obstore.delete(self._small, self._prefix + name)
        except FileNotFoundError:
            return
        except _FAILURES as error:
            raise WriteFailed(f"{name} could not be deleted: {_sentence(error)}") from error

    def _for(self, size: int) -> ObjectStore:
        return self._small if size <= SMALL_BYTES else self._large

    def _read_back(self, name: str, data: bytes, *, failure: Exception) -> bytes | None:
        """Read the bytes that are under a name now; None when there are none."""
        try:
            return self.read(name, max_bytes=len(data))
        except ObjectMissing:
            return None
        except ObjectRefused:
            return b""  # it is larger than ours, so it is somebody else's
        except StoreError as error:
            if isinstance(failure, _REFUSED):
                raise WriteFailed(f"{name} could not be written: {_sentence(failure)}") from failure
            raise _unknown(name, failure) from error

    def _prove(self) -> None:
        """Check before the first write that the backend honours create-if-absent. It is asked to
        create `store.json` with the bytes that are there, so a backend that overwrites does no
        harm. Where there is no `store.json` yet, the maker of the store probes."""
        if self._proved:
            return
        try:
            held = self.read(STORE, max_bytes=SMALL_BYTES)
            obstore.put(self._small, self._prefix + STORE, held, mode="create")
        except ObjectMissing:
            return
        except _TAKEN:
            self._proved = True
            return
        except (*_FAILURES, StoreError) as error:
            raise WriteFailed(f"nothing could be written: {_sentence(error)}") from error
        raise StoreUnsupported("the backend overwrites objects, so it cannot hold a store")


def folders_below(location: str) -> list[str]:
    """List the names of the folders right below a location of a bucket."""
    bucket, prefix = _split(location)
    connected = _connected(bucket, timeout=_SMALL_TIMEOUT, retry=RETRY)
    with _explained(f"{location} could not be listed"):
        found = obstore.list_with_delimiter(connected, prefix=prefix or None)["common_prefixes"]
    return [folder.removeprefix(prefix).rstrip("/") for folder in found]


def _split(location: str) -> tuple[str, str]:
    """Split a location into its bucket and the prefix of its names, which ends with a slash unless
    it is empty. Raise WrongUsage for a location of another form."""
    if not _LOCATION.fullmatch(location) or "/." in location:
        raise WrongUsage(
            f"{location} is not the location of a store: "
            "a directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
        )
    scheme, _, path = location.partition("://")
    bucket, _, prefix = path.strip("/").partition("/")
    return f"{scheme}://{bucket}", f"{prefix}/" if prefix else ""


_connecting = threading.Lock()
_connections: dict[tuple[object, ...], ObjectStore] = {}
"""Clients by bucket and settings. One takes 100 kB and 6 ms, and a server may read a thousand
stores in one bucket."""
_MOST_CONNECTIONS = 16
_CLOUDS = ("AWS_", "AZURE_", "GOOGLE_")


def _connected(bucket: str, *, timeout: timedelta, retry: RetryConfig) -> ObjectStore:
    """Return the client of a bucket, made anew if the environment has changed."""
    settings = tuple(sorted(item for item in environ.items() if item[0].startswith(_CLOUDS)))
    key = (bucket, timeout, repr(retry), settings)
    with _connecting:
        if key not in _connections:
            if len(_connections) >= _MOST_CONNECTIONS:
                _connections.pop(next(iter(_connections)))
            _connections[key] = _connect(bucket, timeout=timeout, retry=retry)
        return _connections[key]


def _connect(location: str, *, timeout: timedelta, retry: RetryConfig) -> ObjectStore:
    endpoint = next((environ[name] for name in _ENDPOINTS if environ.get(name)), "")
    # An endpoint without TLS is meant as it is; obstore alone would ask for a second setting.
    allow_http = endpoint.startswith("http://") or environ.get("AWS_ALLOW_HTTP") == "true"
    options: ClientConfig = {"timeout": timeout, "allow_http": allow_http}
    try:
        return from_url(location, client_options=options, retry_config=retry)
    except _FAILURES as error:
        raise WrongUsage(f"{location} cannot be reached: {_sentence(error)}") from error


def _unknown(name: str, failure: Exception) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"it is not known whether {name} was written, and nothing was deleted: {_sentence(failure)}"
    )


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except _FAILURES as error:
        raise StoreError(f"{what}: {_sentence(error)}") from error


def _is_object_name(name: str) -> bool:
    try:
        check_object_name(name)
    except ObjectRefused:
        return False
    return True


def _sentence(error: Exception) -> str:
    """Keep the parts of obstore's message that are for people, on one line. Durations are left
    out: a caller that asks every second logs the same line only once."""
    asked, _, answer = str(error).partition("\n\nDebug source")[0].partition(": <")
    _, _, what = asked.rpartition("Error performing ")
    what = _TOOK.sub("", what)
    reason = re.search(r"<Message>([^<>]{1,200})</Message>", answer)
    sentence = f"{what} ({reason[1]})" if reason else what
    return " ".join(sentence.split()).rstrip(".")
