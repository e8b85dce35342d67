"""Verified copies of single files between stores, through a scratch folder that a later run cleans up."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streamvid.dataset.integrity import until_right
from streamvid.dataset.manifest import FileInfo
from streamvid.dataset.passes import BLOCK_BYTES, read_blocks
from streamvid.errors import IntegrityError, StorageError
from streamvid.storage import LocalStore, Store

SCRATCH = ".copying"
"""Scratch folder in a local destination, on the same file system, so that files can be renamed into place."""

_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class FileCopier:
    """Copies files between two stores. If `dest` is remote, only files larger than 16 MiB use the scratch folder."""

    source: Store
    dest: Store
    folder: Path

    def copy(self, file: FileInfo, stop: threading.Event, name: str = "") -> None:
        """Copy a file. Raises IntegrityError if the bytes at the source do not match the manifest.

        name: path of the copy, if it differs from the path of the file.
        """
        data: bytes | Path = b""

        def read() -> bytes:
            nonlocal data
            data, digest = self._read(file, stop)
            return digest

        found = until_right(self.source, file.path, bytes.fromhex(file.sha256), read).hex()
        if found == file.sha256:
            self.dest.put(name or file.path, data)
            return
        raise IntegrityError(
            f"source {self.source.url}: {file.path} is damaged (its SHA-256 is {found}, not {file.sha256}). Nothing "
            "was published. List all damage with `streamvid verify --deep`, repair the source, and run this command "
            "again"
        )

    def put(self, path: str, data: bytes) -> None:
        """Store bytes that have already been verified."""
        if self.dest.is_local:
            local = self._local(path)
            local.write_bytes(data)
            self.dest.put(path, local)
        else:
            self.dest.put(path, data)

    def _read(self, file: FileInfo, stop: threading.Event) -> tuple[bytes | Path, bytes]:
        """Read a file. Return its bytes or the path of a scratch copy, and its SHA-256."""
        digest = hashlib.sha256()
        if file.num_bytes <= BLOCK_BYTES and not self.dest.is_local:
            data = b"".join(map(bytes, read_blocks(self.source, file.path, file.num_bytes, stop)))
            return data, hashlib.sha256(data).digest()
        local = self._local(file.path)
        try:
            with local.open("wb") as out:
                for block in read_blocks(self.source, file.path, file.num_bytes, stop):
                    digest.update(block)
                    out.write(block)
        except OSError as error:
            remedy = "free disk space there"
            if not self.dest.is_local:
                remedy += ", or set temp_dir (--temp-dir) to another folder"
            raise StorageError(f"cannot write {local}: {error.strerror or error}; {remedy}") from error
        return local, digest.digest()

    def _local(self, path: str) -> Path:
        return self.folder / hashlib.sha256(path.encode()).hexdigest()[:32]


@contextmanager
def scratch_folder(dest: Store, name: str, temp_dir: str | Path | None) -> Iterator[Path]:
    """Create an empty scratch folder for a `with` block, and remove it at the end of the block.

    name: text that identifies the data. If `dest` is remote, the folder's name depends on this text and on the URL.
    """
    if isinstance(dest, LocalStore):
        folder = dest.root / SCRATCH
    else:
        folder = Path(temp_dir or tempfile.gettempdir()) / f"streamvid-copy-{os.getuid()}-{_digest(dest.url, name)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove(folder)
        folder.mkdir(mode=0o700)
    except OSError as error:
        place = "dest" if dest.is_local else "temp_dir (--temp-dir)"
        raise StorageError(
            f"cannot write to {folder.parent}: {error.strerror or error}; set {place} to a writable folder"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _remove(folder: Path) -> None:
    """Remove the scratch folder of a killed run.

    Raises StorageError if the folder may contain files that an earlier run did not create.
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    is_mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_mine or not all(_NAME.fullmatch(path.name) for path in folder.iterdir()):
        raise StorageError(
            f"{folder} exists, but is not the scratch directory of an earlier copy by this user; remove this folder"
        )
    shutil.rmtree(folder)
