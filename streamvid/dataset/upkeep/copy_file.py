"""One file from store to store, proved as it passes."""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from streamvid.dataset.integrity import until_right
from streamvid.dataset.manifest import FileInfo
from streamvid.dataset.passes import BLOCK_BYTES, read_blocks
from streamvid.dataset.upkeep.spool import spooled_name
from streamvid.errors import IntegrityError, StorageError
from streamvid.storage import FileState, Store

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Transfer:
    """From a store to another. `folder`: for what is on its way; files of one block need none where dest is remote."""

    source: Store
    dest: Store
    folder: Path

    def copy(self, file: FileInfo, stop: threading.Event) -> None:
        """Put a file at dest; IntegrityError where the source has other bytes than its manifest says.

        Wrong bytes are read again, as they may have gone wrong on their way.
        """
        data: bytes | Path = b""

        def read() -> bytes:
            nonlocal data
            data, digest = self._read(file, stop)
            return digest

        found = until_right(self.source, file.path, bytes.fromhex(file.sha256), read).hex()
        if found == file.sha256:
            self.dest.put(file.path, data)
            return
        raise IntegrityError(
            f"source {self.source.url}: {file.path} is damaged: its SHA-256 is {found}, not {file.sha256}. Nothing was "
            "sealed; `streamvid verify --deep` of the source says what else is wrong. Repair it there and run the same "
            "command again"
        )

    def put(self, path: str, data: bytes) -> None:
        """Bytes that are known to be right."""
        if self.dest.is_local:
            local = self._local(path)
            local.write_bytes(data)
            self.dest.put(path, local)
        else:
            self.dest.put(path, data)

    def _read(self, file: FileInfo, stop: threading.Event) -> tuple[bytes | Path, bytes]:
        """The file's bytes or where they are now, and their SHA-256."""
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
            raise StorageError(
                f"cannot write {local}: {error.strerror or error}; make room there, or give another folder by temp_dir"
            ) from error
        return local, digest.digest()

    def _local(self, path: str) -> Path:
        return self.folder / spooled_name(path)


def proves(store: Store, file: FileInfo, state: FileState, stop: threading.Event) -> bool:
    """Whether a file that has the right size has the right bytes; no where they cannot be read."""
    digest = hashlib.sha256()
    try:
        for block in read_blocks(store, file.path, file.num_bytes, stop, state.version):
            digest.update(block)
    except StorageError as error:
        _log.warning("%s: %s cannot be read (%s); it is put again", store.url, file.path, error)
        return False
    return digest.hexdigest() == file.sha256
