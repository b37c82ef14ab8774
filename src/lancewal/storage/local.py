"""A directory on a local disk as an object store: atomic creates, and fsync where it counts.

An object is written to a file without a name, synced, and then linked to its name. The link
either succeeds or finds the name taken, so a race has exactly one winner, readers see only whole
objects, and a killed writer leaves nothing behind. If the file system has no nameless files, a
hidden staging file is used instead. A killed writer may leave it behind; listings leave it out,
and garbage collection removes it.

Symbolic links below the root are never followed, because they may lead out of the table. Reading or
writing through a link is refused; listing and deleting apply to the link itself. The root may be a link.
"""

from __future__ import annotations

import builtins
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from lancewal.errors import OutcomeUnknownError, StorageError
from lancewal.storage.backend import ObjectInfo, TransientError
from lancewal.storage.location import is_staging_name

_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS)
_CANNOT_LINK_NAMELESS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_MAY_PASS = (errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT)
_ADVICE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "permission denied; check the owner and mode of the directory",
    errno.EPERM: "not permitted; check its owner, and that the file system has hard links",
    errno.EROFS: "the file system is read-only",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENOTDIR: "a file stands where a directory is needed",
    errno.EISDIR: "a directory stands where a file is needed",
    errno.ENAMETOOLONG: "the name is too long for this file system",
}
_NOT_THERE = (FileNotFoundError, NotADirectoryError)
_MODE = 0o666
# Passing through a directory needs no permission to read it.
_WALK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
_MAX_LINK_FREE = 1 << 16
# Another process may remove a directory between its creation and its use, but not for ever.
_DIRECTORY_ATTEMPTS = 8


class LocalBackend:
    """Objects below ``root``. With ``fsync`` a write survives a power cut once it has returned."""

    def __init__(self, root: str, *, fsync: bool) -> None:
        self._root = root
        self.fsync = fsync
        self._nameless_files = hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd")
        # Directories whose names are synced up to the root. With their inodes, because a directory
        # that was deleted and made again has to be synced again. Racing threads at worst sync twice.
        self._anchored: dict[str, int] = {}
        # Directories without a link in their path. Each is checked only once, for speed.
        self._link_free: set[str] = set()
        self._root_inode: int | None = None

    def full_path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def create(self, path: str, data: memoryview) -> bool:
        target = self.full_path(path)
        directory = os.path.dirname(target)
        self._refuse_link_above(path, "create")
        try:
            for _ in range(_DIRECTORY_ATTEMPTS):
                try:
                    created = self._create(directory, target, data)
                    if created and self.fsync:
                        self._sync_name("create", directory, target)
                    return created
                except FileNotFoundError:
                    self._make_directory(directory)
        except OSError as error:
            raise _failure("create", target, error) from error
        raise StorageError(f"cannot create {target!r}: its directory keeps vanishing")

    def settle(self, path: str) -> None:
        if not self.fsync:
            return
        target = self.full_path(path)
        try:
            _sync(target, os.O_RDONLY | os.O_NOFOLLOW)
            self._sync_directory(os.path.dirname(target))
        except OSError as error:
            raise _failure("sync", target, error) from error

    def replace(self, path: str, data: memoryview, *, durable: bool) -> None:
        target = self.full_path(path)
        directory = os.path.dirname(target)
        sync = durable and self.fsync
        self._refuse_link_above(path, "write")
        try:
            for _ in range(_DIRECTORY_ATTEMPTS):
                try:
                    self._put(target, [data], sync=sync)
                    return
                except FileNotFoundError:
                    self._make_directory(directory)
        except OSError as error:
            raise _failure("write", target, error) from error
        raise StorageError(f"cannot write {target!r}: its directory keeps vanishing")

    def replace_from(self, path: str, chunks: Iterator[bytes]) -> None:
        target = self.full_path(path)
        try:
            self._make_directory(os.path.dirname(target))
            self._put(target, chunks, sync=self.fsync)
        except OSError as error:
            raise _failure("write", target, error) from error

    def read(self, path: str) -> bytes:
        return self._read(path, 0, None)

    def read_range(self, path: str, start: int, length: int) -> bytes:
        return self._read(path, start, length)

    def head(self, path: str) -> ObjectInfo | None:
        target = self.full_path(path)
        self._refuse_link_above(path, "look up")
        try:
            status = os.lstat(target)
            if stat.S_ISLNK(status.st_mode):
                raise _is_a_link(target)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _failure("look up", target, error) from error
        return None if stat.S_ISDIR(status.st_mode) else _info(path, status)

    def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        return self._list(prefix, staging=False)

    def list_staging(self, prefix: str) -> builtins.list[ObjectInfo]:
        return self._list(prefix, staging=True)

    def list_directories(self, prefix: str) -> builtins.list[str]:
        try:
            with self._directory(prefix) as directory:
                return [
                    entry.name
                    for entry in _entries(directory)
                    # Links too, so that their targets do not appear to be missing.
                    if entry.is_dir(follow_symlinks=False) or entry.is_symlink()
                ]
        except _NOT_THERE:
            return []
        except OSError as error:
            raise _failure("list", self.full_path(prefix), error) from error

    def delete(self, path: str) -> None:
        above, _, name = path.rpartition("/")
        try:
            with self._directory(above) as directory:
                os.unlink(name, dir_fd=directory)
        except _NOT_THERE:
            return
        except OSError as error:
            raise _failure("delete", self.full_path(path), error) from error

    def delete_many(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.delete(path)

    def delete_prefix(self, prefix: str) -> int:
        above, _, name = prefix.rpartition("/")
        try:
            with self._directory(above) as directory:
                return _delete_tree(directory, name)
        except _NOT_THERE:
            return 0
        except OSError as error:
            raise _failure("delete", self.full_path(prefix), error) from error

    def link(self, path: str) -> ObjectInfo | None:
        """The symbolic link at ``path``, if there is one."""
        above, _, name = path.rpartition("/")
        try:
            with self._directory(above) as directory:
                status = os.lstat(name, dir_fd=directory)
        except _NOT_THERE:
            return None
        except OSError as error:
            raise _failure("look up", self.full_path(path), error) from error
        return _info(path, status) if stat.S_ISLNK(status.st_mode) else None

    def refuse_links(self, path: str) -> None:
        """Raise if there is a link in the path of the directory, or anywhere below it."""
        try:
            with self._directory(path) as directory:
                _refuse_links_below(directory)
        except _NOT_THERE:
            return
        except OSError as error:
            raise _failure("open", self.full_path(path), error) from error

    def check_root(self) -> None:
        """Raise if the root is no longer the same directory as before.

        Its disk may have been unmounted. Files written to the empty mount point would be hidden when the disk
        is mounted again.
        """
        known = self._root_inode  # read first: another thread may create the root in between
        try:
            inode = os.stat(self._root).st_ino
        except _NOT_THERE:
            inode = None
        except OSError as error:
            raise _failure("open", self._root, error) from error
        if known is None:
            self._root_inode = inode or self._root_inode
        elif inode != known:
            found = "is gone" if inode is None else "was replaced by another one"
            raise StorageError(f"the directory {self._root!r} {found}: see that its disk is mounted")

    def _put(self, target: str, chunks: Iterable[bytes | memoryview], *, sync: bool) -> None:
        staging = _stage(target, chunks, sync=sync)
        try:
            os.rename(staging, target)
        except BaseException:
            _discard(staging)
            raise
        if sync:
            self._sync_name("write", os.path.dirname(target), target)

    def _create(self, directory: str, target: str, data: memoryview) -> bool:
        if self._nameless_files:
            created = self._link_nameless(directory, target, data)
            if created is not None:
                return created
            self._nameless_files = False
        staging = _stage(target, [data], sync=self.fsync)
        try:
            os.link(staging, target)
        except FileExistsError:
            return False
        finally:
            _discard(staging)
        return True

    def _link_nameless(self, directory: str, target: str, data: memoryview) -> bool | None:
        """Whether ``target`` was created; ``None`` where the file system cannot do it this way."""
        try:
            file = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_NOFOLLOW, _MODE)
        except OSError as error:
            if error.errno in _NO_NAMELESS_FILES:
                return None
            raise
        try:
            _fill(file, [data], sync=self.fsync)
            # A directory descriptor, though the path is absolute: only then does Python call
            # linkat, which follows the symbolic link in /proc to the file itself.
            os.link(f"/proc/self/fd/{file}", target, src_dir_fd=file, follow_symlinks=True)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _CANNOT_LINK_NAMELESS:
                return None
            raise
        finally:
            # The file is already linked, and synced if required, so an error here does not matter.
            with suppress(OSError):
                os.close(file)
        return True

    def _sync_name(self, action: str, directory: str, target: str) -> None:
        """Sync the name of an object that is already visible; until then a power cut may remove it."""
        try:
            self._sync_directory(directory)
        except FileNotFoundError:
            raise
        except OSError as error:
            failure = _failure(action, target, error)
            if isinstance(failure, TransientError):
                raise failure from error
            text = f"{failure}; it is visible, but may not survive a power cut"
            raise OutcomeUnknownError(text) from error

    def _sync_directory(self, directory: str) -> None:
        inode = _sync(directory, os.O_RDONLY | os.O_DIRECTORY)
        if self._anchored.get(directory) == inode:
            return
        # The creator of this directory (another thread or process, or Lance, which never syncs) may not
        # have synced its name yet. So the first writer here syncs every level up to the root.
        parent = directory
        while len(parent) > len(self._root):
            parent = os.path.dirname(parent)
            _sync(parent, os.O_RDONLY | os.O_DIRECTORY)
        self._anchored[directory] = inode

    def _make_directory(self, directory: str) -> None:
        self.check_root()
        missing = [directory]
        while not os.path.isdir(parent := os.path.dirname(missing[-1])):
            if parent == missing[-1]:
                break
            missing.append(parent)
        for each in reversed(missing):
            try:
                os.mkdir(each)
            except FileExistsError:
                continue
            self._anchored.pop(each, None)
            # Levels below the root are synced with the first object in them.
            if self.fsync and len(each) <= len(self._root):
                _sync(os.path.dirname(each), os.O_RDONLY | os.O_DIRECTORY)

    def _read(self, path: str, start: int, length: int | None) -> bytes:
        target = self.full_path(path)
        self._refuse_link_above(path, "read")
        try:
            file = os.open(target, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                there = max(os.fstat(file).st_size - start, 0)
                wanted = there if length is None else min(length, there)
                data = os.pread(file, wanted, start)
                # One call reads at most 2 GiB.
                while len(data) < wanted and (more := os.pread(file, wanted - len(data), start + len(data))):
                    data += more
                return data
            finally:
                os.close(file)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise FileNotFoundError(f"{target!r} does not exist") from None
        except OSError as error:
            raise _failure("read", target, error) from error

    def _list(self, prefix: str, *, staging: bool) -> builtins.list[ObjectInfo]:
        found: builtins.list[ObjectInfo] = []
        try:
            with self._directory(prefix) as directory:
                _list_below(directory, prefix, staging, found)
        except _NOT_THERE:
            return []
        except OSError as error:
            raise _failure("list", self.full_path(prefix), error) from error
        return found

    @contextmanager
    def _directory(self, path: str) -> Iterator[int]:
        """A descriptor of a directory, reached without following a link below the root.

        Raises one of ``_NOT_THERE`` when it does not exist, and ``ELOOP`` for a link in its path.
        """
        current = os.open(self._root, _WALK)
        try:
            for name in path.split("/") if path else ():
                above, current = current, _open_directory(name, current)
                # Closed only after ``current`` has changed. Otherwise Ctrl-C in between would close the
                # descriptor twice, and the second close might hit another thread's file.
                os.close(above)
            yield current
        finally:
            os.close(current)

    def _refuse_link_above(self, path: str, action: str) -> None:
        above = path[: max(path.rfind("/"), 0)]
        if above in self._link_free:
            return
        self.check_root()
        try:
            with self._directory(above):
                pass
        except _NOT_THERE:
            return
        except OSError as error:
            raise _failure(action, self.full_path(path), error) from error
        if len(self._link_free) >= _MAX_LINK_FREE:
            self._link_free.clear()
        self._link_free.add(above)


def _open_directory(name: str, parent: int) -> int:
    try:
        return os.open(name, _WALK | os.O_NOFOLLOW, dir_fd=parent)
    except NotADirectoryError:
        if stat.S_ISLNK(os.lstat(name, dir_fd=parent).st_mode):
            raise _is_a_link(name) from None
        raise


def _entries(directory: int) -> Iterator[os.DirEntry[str]]:
    readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)
    try:
        with os.scandir(readable) as entries:
            yield from entries
    finally:
        os.close(readable)


def _list_below(directory: int, path: str, staging: bool, found: list[ObjectInfo]) -> None:
    for entry in _entries(directory):
        # A file that vanishes during the listing is left out.
        with suppress(*_NOT_THERE):
            below = f"{path}/{entry.name}" if path else entry.name
            if entry.is_dir(follow_symlinks=False):
                with _opened(entry.name, directory) as child:
                    _list_below(child, below, staging, found)
            elif is_staging_name(entry.name) == staging:
                found.append(_info(below, entry.stat(follow_symlinks=False)))


def _delete_tree(parent: int, name: str) -> int:
    """Delete a directory tree; returns how many objects it held. A link is deleted, but not its target."""
    deleted = 0
    try:
        with _opened(name, parent) as directory:
            for entry in list(_entries(directory)):
                with suppress(*_NOT_THERE):
                    if entry.is_dir(follow_symlinks=False):
                        deleted += _delete_tree(directory, entry.name)
                    else:
                        os.unlink(entry.name, dir_fd=directory)
                        deleted += 1
        os.rmdir(name, dir_fd=parent)
    except _NOT_THERE:
        return deleted
    except OSError as error:
        if error.errno == errno.ELOOP:
            os.unlink(name, dir_fd=parent)
            return deleted + 1
        # Another thread or process has written into it: the new file stays.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    return deleted


def _refuse_links_below(directory: int) -> None:
    for entry in _entries(directory):
        if entry.is_symlink():
            raise _is_a_link(entry.name)
        if entry.is_dir(follow_symlinks=False):
            with suppress(*_NOT_THERE), _opened(entry.name, directory) as child:
                _refuse_links_below(child)


@contextmanager
def _opened(name: str, parent: int) -> Iterator[int]:
    directory = _open_directory(name, parent)
    try:
        yield directory
    finally:
        os.close(directory)


def _is_a_link(name: str) -> OSError:
    return OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)


def _stage(target: str, chunks: Iterable[bytes | memoryview], *, sync: bool) -> str:
    """Write a hidden file beside ``target``; returns its path."""
    directory, name = os.path.split(target)
    staging = f"{directory}/.{name}.{secrets.token_hex(6)}.tmp"
    file = os.open(staging, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _MODE)
    try:
        _fill(file, chunks, sync=sync)
    except BaseException:
        _discard(staging)
        raise
    finally:
        os.close(file)
    return staging


def _fill(file: int, chunks: Iterable[bytes | memoryview], *, sync: bool) -> None:
    for data in chunks:
        written = os.write(file, data)
        while written < len(data):
            written += os.write(file, data[written:])
    if sync:
        os.fsync(file)


def _sync(path: str, flags: int) -> int:
    """Sync one file or directory; returns its inode number."""
    file = os.open(path, flags)
    try:
        os.fsync(file)
        return os.fstat(file).st_ino
    finally:
        os.close(file)


def _discard(staging: str) -> None:
    # Errors are ignored, because the caller's own outcome matters more. Garbage collection removes the file.
    with suppress(OSError):
        os.unlink(staging)


def _info(path: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(path, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))


def _failure(action: str, target: str, error: OSError) -> StorageError:
    if error.errno == errno.ELOOP:
        link = os.path.basename(error.filename or target)
        return StorageError(
            f"cannot {action} {target!r}: {link!r} is a symbolic link, and none below a table is followed; "
            "put what it points at in its place, or remove it"
        )
    kind = TransientError if error.errno in _MAY_PASS else StorageError
    advice = _ADVICE.get(error.errno or 0, error.strerror or type(error).__name__)
    name = errno.errorcode.get(error.errno or 0, "unknown")
    return kind(f"cannot {action} {target!r}: {advice} ({name})")
