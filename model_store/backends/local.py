"""Keep objects as files in a directory: written aside, then linked to their names."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from model_store.backends.base import (
    MAX_NAME_PARTS,
    NAME_PART,
    Entry,
    ObjectMissing,
    ObjectRefused,
    check_object_name,
)
from model_store.errors import OutcomeUnknown, StoreError, StoreUnsupported, WriteFailed

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# NONBLOCK: opening a pipe that someone planted must not wait for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalDirectory:
    """Objects as files below one directory. Every folder on the way is opened without following
    symbolic links, so nothing outside the directory is ever read or written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._durable: set[str] = set()
        """Folders with names that this process has fsynced: only their content is left to sync."""

    def create(self, name: str, data: bytes) -> bool:
        parts = check_object_name(name)
        linked = False
        try:
            with ExitStack() as opened:
                root = self._made_root(opened)
                tmp = self._made_folder(opened, "tmp", root=root)
                folder = self._made_folder(opened, *parts[:-1], root=root)
                with _temporary_file(data, folder=tmp) as temporary:
                    linked = _link(temporary, parts[-1], source=tmp, target=folder)
                # Also where it was there before: its maker may have died before this step.
                os.fsync(folder)
        except OSError as error:
            if linked:
                raise OutcomeUnknown(
                    f"{name} was written, but may not survive a power cut: {error.strerror}"
                ) from error
            raise WriteFailed(f"{name} could not be written: {error.strerror}") from error
        return linked

    def read(self, name: str, *, max_bytes: int) -> bytes:
        parts = check_object_name(name)
        try:
            with self._folder(*parts[:-1]) as folder, _opened(parts[-1], folder=folder) as file:
                return _read_bounded(name, file, max_bytes=max_bytes)
        except FileNotFoundError as error:
            raise ObjectMissing(name) from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise ObjectRefused(name, "it is not a regular file") from error
            raise StoreError(f"{name} could not be read: {error.strerror}") from error

    def list(self, folder: str, *, after: str = "") -> Sequence[Entry]:
        with self._walk(folder) as items:
            return tuple(
                Entry(name=name, bytes=status.st_size, modified_s=status.st_mtime)
                for name, item in items
                if name > after and (status := _status(item)) is not None
            )

    def list_names(self, folder: str) -> Sequence[str]:
        with self._walk(folder) as items:
            return tuple(name for name, _ in items)

    @contextmanager
    def _walk(self, folder: str) -> Iterator[Iterator[tuple[str, os.DirEntry[str]]]]:
        """Yield everything that may be an object below a folder, which stays open meanwhile."""
        parts = check_object_name(folder)
        try:
            with ExitStack() as opened:
                try:
                    file = opened.enter_context(self._folder(*parts))
                except FileNotFoundError:
                    yield iter(())
                else:
                    yield _items(file, prefix=folder, depth=MAX_NAME_PARTS - len(parts))
        except OSError as error:
            raise StoreError(f"{folder} could not be listed: {error.strerror}") from error

    def delete(self, name: str) -> None:
        parts = check_object_name(name)
        try:
            with self._folder(*parts[:-1]) as folder:
                os.unlink(parts[-1], dir_fd=folder)
                os.fsync(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise WriteFailed(f"{name} could not be deleted: {error.strerror}") from error

    @contextmanager
    def _folder(self, *parts: str) -> Iterator[int]:
        with ExitStack() as opened:
            folder = _hold(opened, os.open(self.root, _FOLDER))
            for part in parts:
                folder = _hold(opened, os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder))
            yield folder

    def _made_root(self, opened: ExitStack) -> int:
        if "" not in self._durable:
            _make_root(self.root)
            self._durable.add("")
        return _hold(opened, os.open(self.root, _FOLDER))

    def _made_folder(self, opened: ExitStack, *parts: str, root: int) -> int:
        """Open a folder like `_folder`, and make it where it is missing: its name is fsynced into
        its parent."""
        folder, path = root, ""
        for part in parts:
            path = f"{path}/{part}" if path else part
            inner = _hold(opened, self._open_or_make(part, path=path, parent=folder))
            if path not in self._durable:
                os.fsync(folder)
                self._durable.add(path)
            folder = inner
        return folder

    def _open_or_make(self, part: str, *, path: str, parent: int) -> int:
        try:
            return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
        except FileNotFoundError:
            self._durable.discard(path)
        with suppress(FileExistsError):
            os.mkdir(part, dir_fd=parent)
        return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)


def _make_root(root: Path) -> None:
    if root.is_dir():
        return
    _make_root(root.parent)
    root.mkdir(exist_ok=True)
    parent = os.open(root.parent, _FOLDER)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


@contextmanager
def _temporary_file(data: bytes, *, folder: int) -> Iterator[str]:
    """Write a file with `data`, sync it to the disk, and remove it afterwards."""
    name = uuid.uuid4().hex
    file = os.open(name, _WRITE, 0o666, dir_fd=folder)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        finally:
            os.close(file)
        yield name
    finally:
        # A file left in tmp/ harms nobody. The outcome of the write itself must not be hidden.
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)


def _link(temporary: str, name: str, *, source: int, target: int) -> bool:
    try:
        # Atomic, and refuses to overwrite; rename would replace what is there.
        os.link(temporary, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP):
            raise StoreUnsupported(
                "the file system has no hard links, so it cannot hold a store"
            ) from error
        raise
    return True


@contextmanager
def _opened(name: str, *, folder: int) -> Iterator[int]:
    file = os.open(name, _READ, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)


def _read_bounded(name: str, file: int, *, max_bytes: int) -> bytes:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise ObjectRefused(name, "it is not a regular file")
    if status.st_size > max_bytes:
        raise ObjectRefused(name, f"it has {status.st_size} bytes instead of at most {max_bytes}")
    with open(file, "rb", closefd=False) as reader:
        data = reader.read(status.st_size + 1)  # the one byte more shows a file that still grows
    if len(data) > status.st_size:
        raise ObjectRefused(name, "it changed while it was read")
    return data


def _items(folder: int, *, prefix: str, depth: int) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield everything below an open folder that may be an object, with its name."""
    with os.scandir(folder) as items:
        for item in items:
            if not NAME_PART.fullmatch(item.name):
                continue  # no object can have that name: .DS_Store and the like
            name = f"{prefix}/{item.name}"
            if not item.is_dir(follow_symlinks=False):
                yield name, item
            elif depth > 1:
                inner = os.open(item.name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                try:
                    yield from _items(inner, prefix=name, depth=depth - 1)
                finally:
                    os.close(inner)


def _status(item: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of a file; None where it was deleted since the folder was read."""
    try:
        return item.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _hold(opened: ExitStack, file: int) -> int:
    opened.callback(os.close, file)
    return file
