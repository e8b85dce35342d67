"""Journal of the files that a run over a dataset has finished, so that an interrupted run can resume."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamvid.errors import DatasetError
from streamvid.host.journal import Journal
from streamvid.host.lock import wait_for_lock
from streamvid.host.resources import user_cache
from streamvid.storage import FileState

_log = logging.getLogger(__name__)
_VERSION = 1


class FinishedFiles:
    """Journal that records finished files and the states of the files on which they depend. Thread-safe.

    If the journal cannot be written, the run continues, but it cannot be resumed.

    folder: folder of the journal; None uses the user's cache.
    kind, about: values that identify the run. A later run with the same values resumes an interrupted run.
    """

    def __init__(self, folder: str | Path | None, kind: str, about: Mapping[str, Any]) -> None:
        text = json.dumps({"version": _VERSION, "kind": kind, **about}, sort_keys=True)
        self.name = hashlib.sha256(text.encode()).hexdigest()[:32]
        self._path = (user_cache(kind) if folder is None else Path(folder)) / f"{self.name}.journal"
        self._journal: Journal | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> FinishedFiles:
        """Lock the journal. Raises DatasetError if another process is running the same command."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._open.enter_context(wait_for_lock(self._path, 0.0, mode=0o600))
            self._journal = self._open.enter_context(Journal(self._path, {"run": self.name}))
        except TimeoutError:
            raise DatasetError(
                f"the same command is already running on this machine and has locked {self._path}; wait until that "
                "command ends, or stop it"
            ) from None
        except (ImportError, OSError) as error:
            self._give_up(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the journal if the run is complete. Keep it after an error."""
        with contextlib.suppress(OSError):
            if self._journal is not None and kind is None:
                self._path.unlink()
        self._journal = None
        self._open.close()

    def forget(self) -> None:
        """Mark every file as unfinished."""
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.clear()

    def is_done(self, path: str, *files: FileState) -> bool:
        """Return True if `path` was finished and `files` have not changed since.

        A file whose version is unknown counts as changed.
        """
        if self._journal is None or not all(file.version for file in files):
            return False
        return bool(self._journal.findings.get((path,)) == _facts(files))

    def add(self, path: str, *files: FileState) -> None:
        """Mark `path` as finished. files: current states of the files on which the result depends."""
        if self._journal is None or not all(file.version for file in files):
            return
        try:
            self._journal.add((path,), _facts(files))
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        reason = error.strerror or error if isinstance(error, OSError) else error
        _log.warning(
            "cannot record progress in %s (%s); if this run is interrupted, it must start over", self._path, reason
        )
        self._journal = None
        with contextlib.suppress(OSError):
            self._open.close()


def _facts(files: tuple[FileState, ...]) -> list[int | str]:
    return [fact for file in files for fact in (file.num_bytes, file.version)]
