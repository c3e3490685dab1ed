"""Open the backend at a location, and find the way from one location to another."""

from __future__ import annotations

import itertools
import os
import re
import stat
from pathlib import Path

from model_store.backends.base import Objects
from model_store.backends.local import LocalDirectory
from model_store.errors import StoreError, WrongUsage

_PART = r"(?!\.\.?(?:/|$))[^/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,128}"
WAY = re.compile(rf"\.\.(?:/\.\.){{0,7}}/{_PART}(?:/{_PART}){{0,7}}")
"""A way leads up at least once and then down, so it names neither a host nor a root."""


def objects_at(location: str) -> Objects:
    """Open the backend for the value of `--store`."""
    if not location:
        raise WrongUsage("the location of the store is empty")
    if "://" in location:
        return _object_storage(location)
    if _is_something_else(location):
        raise WrongUsage(f"{location} is not a directory, so it cannot hold a store")
    return LocalDirectory(Path(location))


def way_between(start: str, end: str) -> str:
    """Return the way from one store to another: both in directories, or both in one bucket."""
    (root, at), (other_root, to) = _parts(start), _parts(end)
    if root != other_root:
        raise WrongUsage(
            f"{start} cannot borrow from {end}: both must be directories, or in one bucket"
        )
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(at, to, strict=False))
    shared = len(list(same))
    if shared in (len(at), len(to)):
        raise WrongUsage(f"{start} cannot borrow from {end}: no store is inside another one")
    way = "/".join([*[".."] * (len(at) - shared), *to[shared:]])
    if not WAY.fullmatch(way):
        raise WrongUsage(
            f"{start} cannot borrow from {end}: the way there, {way!r}, has more than eight steps "
            "up or down, or a character that cannot be written"
        )
    return way


def follow_way(start: str, way: str) -> str:
    """Return the location that a way leads to. Raise StoreError where it leads out at the top."""
    root, parts = _parts(start)
    for step in way.split("/"):
        if step != "..":
            parts.append(step)
        elif parts:
            parts.pop()
        else:
            raise StoreError(f"the way {way!r} leads out of {root} from {start}")
    return root + "/".join(parts)


def _parts(location: str) -> tuple[str, list[str]]:
    """Split a location into the root of a file system or a bucket, and the parts below."""
    scheme, separator, place = location.rpartition("://")
    if not separator:
        root, path = "/", os.path.realpath(location)
    else:
        bucket, _, path = place.partition("/")
        root = f"{scheme}://{bucket}/"
    return root, [part for part in path.split("/") if part]


def _is_something_else(location: str) -> bool:
    """Return whether the location is taken by anything but a directory."""
    try:
        return not stat.S_ISDIR(os.stat(location).st_mode)
    except FileNotFoundError:
        return os.path.islink(location)  # one that leads nowhere
    except OSError as error:
        raise StoreError(f"{location} could not be read: {error.strerror}") from error


def _object_storage(location: str) -> Objects:
    try:
        # Here and not above: it takes longer to load than `dne-store list` takes on a directory.
        from model_store.backends.s3 import ObjectStorage
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise WrongUsage(
            f"{location} needs the package obstore: pip install 'dne-serve[s3]'"
        ) from error
    return ObjectStorage(location)
