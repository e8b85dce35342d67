"""A folder as a store."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from streamvid.errors import StorageError
from streamvid.storage.store import check_relative


@dataclass(frozen=True)
class LocalStore:
    """A folder on this machine. Puts are atomic: a temporary name in the same folder, synced, then renamed."""

    root: Path

    @property
    def url(self) -> str:
        return str(self.root)

    def path(self, path: str) -> Path:
        """The local file that a store path names."""
        return self.root / check_relative(path)

    def size(self, path: str) -> int | None:
        try:
            status = self.path(path).stat()
            return status.st_size if stat.S_ISREG(status.st_mode) else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._error("look at", path, error) from error

    def read(self, path: str) -> bytes:
        try:
            return self.path(path).read_bytes()
        except OSError as error:
            raise self._error("read", path, error) from error

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        try:
            descriptor = os.open(self.path(path), os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < len(buffer):
                    count = os.preadv(descriptor, [buffer[done:]], offset + done)
                    if count == 0:
                        raise StorageError(
                            f"{self.url}: {path} ends at byte {offset + done}, "
                            f"{len(buffer) - done} bytes before what the index says; verify or copy the dataset again"
                        )
                    done += count
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._error("read", path, error) from error

    def put(self, path: str, data: bytes | Path) -> None:
        target = self.path(path)
        temporary = target.with_name(f".{target.name}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(data, Path):
                with data.open("rb") as file:
                    os.fsync(file.fileno())
                data.replace(target)
            else:
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            _sync_folder(target.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise self._error("write", path, error) from error

    def remove(self, path: str) -> None:
        try:
            self.path(path).unlink(missing_ok=True)
        except OSError as error:
            raise self._error("remove", path, error) from error

    def _error(self, verb: str, path: str, error: OSError) -> StorageError:
        return StorageError(f"{self.url}: cannot {verb} {path}: {error.strerror or error}")


def _sync_folder(folder: Path) -> None:
    # A rename is durable only once the folder that holds the name is.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
