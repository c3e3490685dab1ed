"""Open the backend of a location: a directory or object storage."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from model_store.backends.base import Objects
from model_store.backends.local import LocalDirectory
from model_store.errors import StoreError, WrongUsage


def objects_at(location: str) -> Objects:
    """Open the backend for the value of `--store`."""
    if not location:
        raise WrongUsage("the location of the store is empty")
    if "://" in location:
        return _object_storage(location)
    if _is_something_else(location):
        raise WrongUsage(f"{location} is not a directory, so it cannot hold a store")
    return LocalDirectory(Path(location))


@contextmanager
def leaving_no_folders(location: str) -> Iterator[None]:
    """Remove the folders that are made inside and are still empty at the end."""
    root = Path(location)
    missing: list[Path] = []
    if "://" not in location:
        missing = [one for one in (root / "tmp", root, *root.parents) if not one.exists()]
    try:
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # somebody uses it by now
                folder.rmdir()


def _is_something_else(location: str) -> bool:
    """Tell whether the location is taken by anything but a directory. A disk that cannot be read
    is no fault of the user."""
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
