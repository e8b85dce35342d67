"""Encoded and cut clips that are not in a shard yet."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from streamvid.errors import StorageError
from streamvid.sharder.work.destination import STAGING
from streamvid.storage import LocalStore, StorageOptions, Store, open_store

_CLIPS = "clips"


@dataclass(frozen=True, slots=True)
class ClipFolder:
    """Encoded and cut clips, in a folder on this machine or in the `.staging/` folder of a store that tasks share.

    folder: staging folder.
    dest: URL of the dataset.
    is_shared: True to write clips to the store instead of the folder.
    """

    folder: Path
    dest: str
    storage: StorageOptions
    is_shared: bool

    def put(self, name: str, data: bytes) -> None:
        """Store a clip atomically."""
        if self.is_shared:
            self._store().put(f"{STAGING}/{_CLIPS}/{name}", data)
        else:
            LocalStore(self.folder / _CLIPS).put(name, data)

    def read(self, name: str, source: str, sha256: str) -> bytes:
        """Return the bytes of a clip. Raises StorageError if the clip cannot be read or its bytes have changed."""
        local = LocalStore(self.folder / _CLIPS)
        store, path = (local, name) if local.size(name) is not None else (self._store(), f"{STAGING}/{_CLIPS}/{name}")
        data = store.read(path)
        if hashlib.sha256(data).hexdigest() != sha256:
            store.remove(path)
            raise StorageError(
                f"a clip from {source}, stored in {store.url}, was damaged and has been removed; run the same "
                "command again to recreate it"
            )
        return data

    def sizes(self) -> dict[str, int]:
        """Map the name of each clip to its size in bytes."""
        found: dict[str, int] = {}
        store = self._store()
        places: list[tuple[Store, str]] = [(LocalStore(self.folder), _CLIPS)]
        places += [] if store.is_local else [(store, f"{STAGING}/{_CLIPS}")]
        for place, folder in places:
            found.update({state.path.rpartition("/")[2]: state.num_bytes for state in place.files(folder)})
        return found

    def keep(self, names: set[str]) -> None:
        """Remove all clips except `names` from the folder on this machine."""
        folder = self.folder / _CLIPS
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if path.name not in names:
                path.unlink()

    def drop(self, name: str) -> None:
        """Remove a clip from the folder on this machine."""
        (self.folder / _CLIPS / name).unlink(missing_ok=True)

    def _store(self) -> Store:
        return open_store(self.dest, self.storage)
