"""Writer for one rank's delivery log. It uses no thread and makes one system call per batch."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from streamvid.errors import StorageError
from streamvid.ledger.frames import frame
from streamvid.ledger.records import LEDGER_VERSION, LoggedBatch, batch_record, block_record, start_record
from streamvid.ledger.sessions import SESSION_FILE, newest_session, rank_file, session_folder, tail_file

_BLOCK_SAMPLES = 1024
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class LedgerWriter:
    """Log of the batches that one rank hands out, starting with a loader's first loop.

    `add` appends a batch to the tail file, so that no batch is lost if the process is killed. Every 1,024 samples, the
    batches in the tail file are appended to the log as one compressed block, and the tail file is emptied. If the
    process is killed between these two steps, readers find these batches in both files and count them once.

    Raises StorageError if a file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, urls: list[str]) -> None:
        self._folder, self._rank, self._urls = folder, rank, urls
        self._log = self._tail = -1
        self._tail_path, self._plan = folder, b""
        self._num_records = self._num_samples = 0
        self._pending: list[LoggedBatch] = []

    def begin(self, plan: Mapping[str, Any], cursor: Mapping[str, Any], is_again: bool) -> None:
        """Log the start of a loop. See LoopStart for the arguments.

        plan: JSON values that determine the plan and are the same on all ranks.

        The first loop, and the first loop after the plan changes (for example, because a dataset has a new version),
        open or join a session.
        """
        described = json.dumps(dict(plan), sort_keys=True).encode()
        if self._log >= 0 and described != self._plan:
            self.close()
        if self._log < 0:
            session = {"version": LEDGER_VERSION, "plan": dict(plan), "start": dict(cursor)}
            with _storage_errors(self._folder):
                place = self._enter(json.dumps(session, sort_keys=True).encode())
                self._tail_path = tail_file(place, self._rank)
                self._tail = os.open(self._tail_path, _FLAGS, 0o666)
            self._plan, self._num_records = described, 0
            self._append(self._log, frame({"rank": self._rank, "urls": self._urls}, is_compressed=False))
        self._compact()
        self._append(self._log, frame(start_record(self._num_records, cursor, is_again), is_compressed=False))
        self._num_records += 1

    def add(self, batch: LoggedBatch) -> None:
        """Log a batch that is being handed out."""
        number = self._num_records
        self._append(self._tail, frame(batch_record(number, batch), is_compressed=False))
        self._pending.append(batch)
        self._num_records = number + 1
        self._num_samples += len(batch.samples)
        if self._num_samples >= _BLOCK_SAMPLES:
            self._compact()

    def close(self) -> None:
        """Compress the remaining batches and close the files. Idempotent."""
        if self._log >= 0:
            try:
                self._compact()
                self._tail_path.unlink(missing_ok=True)
            finally:
                for file in (self._log, self._tail):
                    os.close(file)
                self._log = self._tail = -1

    def _compact(self) -> None:
        if not self._pending:
            return
        block = block_record(self._num_records - len(self._pending), self._pending)
        self._append(self._log, frame(block, is_compressed=True))
        self._pending, self._num_samples = [], 0
        with _storage_errors(self._folder):
            os.ftruncate(self._tail, 0)

    def _append(self, file: int, data: bytes) -> None:
        try:
            written = os.write(file, data)
            if written < len(data):
                os.ftruncate(file, os.fstat(file).st_size - written)  # so that a caller who frees space can continue
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise _storage_error(self._folder, error) from error

    def _enter(self, session: bytes) -> Path:
        """Create this rank's log in the newest session or, if necessary, in a new session.

        A new session is necessary if the newest one has a different plan or start, or already has a log for this rank.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            number = newest_session(self._folder)
            place = session_folder(self._folder, number)
            if number and (place / SESSION_FILE).read_bytes() == session:
                try:
                    self._log = os.open(rank_file(place, self._rank), _FLAGS | os.O_EXCL, 0o666)
                except FileExistsError:
                    pass  # an earlier run with the same plan
                else:
                    return place
            _create_session(self._folder, number + 1, session)


def _create_session(folder: Path, number: int, session: bytes) -> None:
    """Create a session, unless another rank has just created it. No incomplete session ever becomes visible."""
    made = folder / f".new-{uuid.uuid4().hex}"
    made.mkdir()
    (made / SESSION_FILE).write_bytes(session)
    try:
        made.rename(session_folder(folder, number))
    except OSError as error:
        shutil.rmtree(made)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


@contextlib.contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _storage_error(folder, error) from error


def _storage_error(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"output.ledger: cannot write to {folder}: {error.strerror or error}; free space there, or choose a writable "
        "folder"
    )
