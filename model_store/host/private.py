"""Keep files that this user alone may write, and seal those whose bytes are believed.

One rule for every cache: its folder belongs to this user, has mode 0700, and nobody else may write
it; its files have mode 0600. A seal is an HMAC-SHA256 over the name and the bytes of a file. Its
key is kept in the state folder, so a person who can write a cache cannot forge a sealed file.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from model_store.errors import NotPrivate

_OTHERS_MAY_WRITE = 0o022
SEAL_BYTES = 32
_KEY_BYTES = 32
KEY_NAME = "cache.key"

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def private_folder(path: Path) -> Path:
    """Make a folder for this user alone, or check the one that is there.

    A folder that others may only read is closed to them. Raise NotPrivate for a folder that others
    own or may write, and OSError where none can be made.
    """
    for missing in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    _check_private(path)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)
    return path


def _check_private(path: Path) -> None:
    """Raise NotPrivate for a folder that others own or may write."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotPrivate(path, "it is not a folder", f"remove {path}")
    if status.st_uid != os.geteuid():
        raise NotPrivate(path, "another user owns it", f"remove {path}, or choose another folder")
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise NotPrivate(
            path, "others may write it", f"remove its files and run `chmod 700 {path}`"
        )


def read_private(path: Path, *, max_bytes: int) -> bytes:
    """Read a regular file that nobody else can have written. Raise OSError or NotPrivate."""
    with open(path, "rb", opener=lambda name, _: os.open(name, READ_FLAGS)) as file:
        status = os.fstat(file.fileno())
        own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not own or status.st_mode & _OTHERS_MAY_WRITE:
            raise NotPrivate(path, "others may have written it", f"remove {path}")
        if status.st_size > max_bytes:
            raise NotPrivate(path, f"it has more than {max_bytes} bytes", f"remove {path}")
        return file.read(max_bytes)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file aside and rename it: readers see the old bytes or the new ones, whole.

    Nothing is synced, so a power cut may tear the file. Readers check a digest.
    """
    unfinished = path.with_name(f"tmp-{uuid.uuid4().hex}")
    try:
        with open(os.open(unfinished, _WRITE_FLAGS, 0o600), "wb") as writer:
            writer.write(data)
        os.replace(unfinished, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)


def _state_folder() -> Path:
    """Return the folder for what this software cannot make again."""
    if given := os.environ.get("DNE_STATE"):
        return Path(given)
    if above := os.environ.get("XDG_STATE_HOME"):
        return Path(above, "dne-serve")
    return Path(os.path.expanduser("~"), ".local", "state", "dne-serve")


def seal(name: str, data: bytes) -> bytes:
    """Compute the seal of a file. Raise OSError or NotPrivate if no key is available."""
    return hmac.digest(_key(), name.encode() + b"\0" + data, "sha256")


def is_sealed(name: str, data: bytes, *, by: bytes) -> bool:
    return hmac.compare_digest(seal(name, data), by)


def _key() -> bytes:
    """Read the key of this user, or make it."""
    path = private_folder(_state_folder()) / KEY_NAME
    with suppress(FileNotFoundError):
        return _checked(path)
    made = path.with_name(f"tmp-{uuid.uuid4().hex}")
    try:
        with open(os.open(made, _WRITE_FLAGS, 0o600), "wb") as writer:
            writer.write(secrets.token_bytes(_KEY_BYTES))
            writer.flush()
            os.fsync(writer.fileno())
        with suppress(FileExistsError):
            os.link(made, path)  # atomic, and the key of a faster process stays
    finally:
        made.unlink(missing_ok=True)
    return _checked(path)


def _checked(path: Path) -> bytes:
    key = read_private(path, max_bytes=_KEY_BYTES)
    if len(key) != _KEY_BYTES:
        raise NotPrivate(path, f"it has {len(key)} bytes and not {_KEY_BYTES}", f"remove {path}")
    return key
