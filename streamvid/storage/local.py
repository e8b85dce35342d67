"""Store in a local folder."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamvid.errors import StorageError
from streamvid.host.page_cache import is_cached
from streamvid.storage.store import DeniedError, FileState, Ranges, Store, check_relative

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems without hard links, such as exFAT and some network file systems."""
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class LocalStore(Store):
    """Store in a folder on this machine. Writes are atomic: a temporary file is synced, then renamed."""

    root: Path
    is_local = True

    @property
    def url(self) -> str:
        return str(self.root)

    def path(self, path: str) -> Path:
        """Return the local path of a file in the store."""
        return self.root / check_relative(path)

    def state(self, path: str) -> FileState | None:
        with self._naming("access", path):
            try:
                status = self.path(path).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return _state(path, status) if stat.S_ISREG(status.st_mode) else None

    def read(self, path: str) -> bytes:
        with self._naming("read", path):
            return self.path(path).read_bytes()

    def read_ranges(self, path: str, ranges: Ranges, version: str = "") -> None:
        # A file object, unlike a descriptor, is closed if a signal's exception arrives before the `with` block.
        with self._naming("read", path), self.path(path).open("rb", buffering=0) as file:
            for offset, buffer in ranges:
                done = fill(file.fileno(), offset, buffer)
                if done < len(buffer):
                    raise StorageError(
                        f"{self.url}: {path} ends at byte {offset + done}, but the read extends to byte "
                        f"{offset + len(buffer)}. The file is truncated or has changed; copy it again"
                    )
            if version and _state(path, os.fstat(file.fileno())).version != version:
                raise StorageError(f"{self.url}: {path} changed while it was in use; run the command again")

    def cached_path(self, path: str, ranges: Sequence[tuple[int, int]]) -> str | None:
        found = f"{self.root}/{check_relative(path)}"
        if not is_cached(found, ranges):
            return None
        return found if self.root.is_absolute() else str(Path.cwd() / found)

    def files(self, folder: str = "") -> Iterator[FileState]:
        root = self.path(folder) if folder else self.root
        with self._naming("list", folder or "its files"):
            names = [found.relative_to(self.root).as_posix() for found in root.rglob("*") if found.is_file()]
        yield from filter(None, map(self.state, sorted(names)))

    def put(self, path: str, data: bytes | Path) -> None:
        target = self.path(path)
        temporary = target.with_name(f".{target.name}.tmp")
        with self._naming("write", path):
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(data, Path):
                with data.open("rb") as file:
                    os.fsync(file.fileno())
                data.replace(target)
            else:
                try:
                    _write(temporary, data)
                    temporary.replace(target)
                except OSError:
                    temporary.unlink(missing_ok=True)
                    raise
            _sync_folder(target.parent)

    def create(self, path: str, data: bytes) -> bool:
        target = self.path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.tmp")
        with self._naming("write", path):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write(temporary, data)
                target.hardlink_to(temporary)  # unlike a rename, a link does not replace an existing file
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return _create_exclusively(target, data)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(target.parent)
        return True

    def remove(self, path: str) -> None:
        with self._naming("remove", path):
            self.path(path).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _naming(self, verb: str, path: str) -> Iterator[None]:
        """Convert file system errors to StorageErrors that name the store and the path."""
        try:
            yield
        except OSError as error:
            kind = DeniedError if error.errno in _DENIED else StorageError
            raise kind(f"{self.url}: cannot {verb} {path}: {write_reason(error)}") from error


def _create_exclusively(target: Path, data: bytes) -> bool:
    """Write a new file on a file system without hard links. Other processes may briefly see an incomplete file."""
    try:
        with target.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def write_reason(error: OSError) -> str:
    """Return the reason for a file system error, including a remedy if the disk is full."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{error.strerror or error}{'; free some space, then run the same command again' if is_full else ''}"


def fill(descriptor: int, offset: int, buffer: memoryview) -> int:
    """Fill a buffer from an offset in an open file.

    Return the number of bytes read, which is less than the buffer's size if the file ends first.
    """
    done = 0
    while done < len(buffer) and (count := os.preadv(descriptor, [buffer[done:]], offset + done)):
        done += count
    return done


def _state(path: str, status: os.stat_result) -> FileState:
    return FileState(path, status.st_size, f"{status.st_mtime_ns}-{status.st_ino}", status.st_mtime)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    # A rename is durable only after its folder is synced.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
