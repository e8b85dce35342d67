"""Journal whose findings the tasks of a build share through `.staging/` in the destination."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from streamvid.cluster.share import Share
from streamvid.host.findings import Key
from streamvid.host.journal import Journal
from streamvid.sharder.work.destination import STAGING
from streamvid.sharder.work.tasks import TASKS, task_folder
from streamvid.storage import FileState, LocalStore, Store

_SECONDS_BETWEEN_PUBLICATIONS = 60.0
_MAX_BYTES = 2**32
_READ_BYTES = 2**24


class SharedJournal(Journal):
    """One task's journal, which also provides the findings of the other tasks.

    folder: staging folder on this machine, which contains the task's journal. If the destination is an object
        store, the journal is copied there at most once per minute and at the end of each `with` block.
    """

    def __init__(
        self, folder: Path, name: str, header: Mapping[str, Any], store: Store, share: Share, writable: bool = True
    ) -> None:
        self._earlier, self._local = folder / name, folder / task_folder(share) / name
        self._store, self._share = store, share
        self._note = f"{STAGING}/{task_folder(share)}/{name}"
        self._is_published = not store.is_local and not share.is_whole
        self._published_at = time.monotonic()
        if self._is_published:
            self._fetch_own()
        super().__init__(self._local, header, writable)
        self.refresh()

    def add(self, key: Key, finding: Any, is_final: bool = True) -> None:
        # The other tasks need every finding, even one that a single machine would find again.
        super().add(key, finding, is_final or not self._share.is_whole)
        if time.monotonic() - self._published_at > _SECONDS_BETWEEN_PUBLICATIONS:
            self._publish()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._publish()

    def refresh(self) -> None:
        """Read the findings from the other tasks and from an earlier run without tasks."""
        if self._earlier != self._local and self._earlier.exists():
            with self._earlier.open("rb") as file:
                self.include(file)
        for state in self._store.files(f"{STAGING}/{TASKS}"):
            is_journal = state.path.endswith(f"/{self._local.name}") and state.path != self._note
            if is_journal and state.num_bytes <= _MAX_BYTES:
                self.include(lines_of(self._store, state))

    def _fetch_own(self) -> None:
        """Fetch this task's journal from the store if the task made more progress on another machine."""
        size = self._store.size(self._note)
        if size is not None and size > (self._local.stat().st_size if self._local.exists() else 0):
            LocalStore(self._local.parent).put(self._local.name, self._store.read(self._note))

    def _publish(self) -> None:
        self._published_at = time.monotonic()
        if self._is_published and self._local.exists():
            self._store.put(self._note, self._local.read_bytes())


def lines_of(store: Store, journal: FileState) -> Iterator[bytes]:
    """Yield the lines of a journal that may grow while it is being read. The last line may be incomplete."""
    if isinstance(store, LocalStore):
        with store.path(journal.path).open("rb") as file:
            yield from file
        return
    left = b""
    for start in range(0, journal.num_bytes, _READ_BYTES):
        data = bytearray(min(_READ_BYTES, journal.num_bytes - start))
        store.read_ranges(journal.path, [(start, memoryview(data))])
        *lines, left = (left + data).split(b"\n")
        yield from (line + b"\n" for line in lines)
    yield left
