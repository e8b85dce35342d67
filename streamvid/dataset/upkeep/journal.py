"""What an interrupted run over many files has done already: lines of a local file, appended as files are done."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from streamvid.errors import DatasetError
from streamvid.host.user_cache import user_cache
from streamvid.storage import FileState

Facts: TypeAlias = tuple[int | str, ...]
"""What must be equal for a file to count as done: sizes and versions."""

_log = logging.getLogger(__name__)
_VERSION = 1
_DIGEST_LETTERS = 32


class Journal:
    """Files that are done, by path, with what they were then. Safe in several threads.

    A line counts only with its checksum, which is also one over what the run is about: torn lines, damaged ones and
    those of another run count as not written. A folder that cannot be written costs what an interrupted run would have
    saved, never the run.
    """

    def __init__(self, folder: str | Path | None, kind: str, about: Mapping[str, Any]) -> None:
        """folder: None: that of the user's caches. kind, about: which run; an equal one goes on where this one was."""
        text = json.dumps({"version": _VERSION, "kind": kind, **about}, sort_keys=True)
        self.name = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LETTERS]
        self._path = (user_cache(kind) if folder is None else Path(folder)) / f"{self.name}.journal"
        self._known: dict[str, Facts] = {}
        self._descriptor: int | None = None

    def __enter__(self) -> Journal:
        """DatasetError while another process has it."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._lock(self._descriptor)
            data = self._path.read_bytes()
            self._known = dict(filter(None, map(self._parse, data.splitlines())))
            if data and not data.endswith(b"\n"):
                os.write(self._descriptor, b"\n")  # what follows a torn line is no part of it
        except OSError as error:
            self._give_up(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The file goes where the run is complete, and stays after an error."""
        if self._descriptor is not None:
            if kind is None:
                with contextlib.suppress(OSError):
                    self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def forget(self) -> None:
        """Nothing is done yet."""
        self._known = {}
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)

    def is_done(self, path: str, *files: FileState) -> bool:
        """Whether `path` was done with these files, and they have not changed; a store that cannot tell says no."""
        return all(file.version for file in files) and self._known.get(path) == _facts(files)

    def add(self, path: str, *files: FileState) -> None:
        """`path` is done, and `files` are what it was done with."""
        if self._descriptor is None or not all(file.version for file in files):
            return
        payload = json.dumps([path, *_facts(files)]).encode()
        try:
            os.write(self._descriptor, self._checksum(payload) + b" " + payload + b"\n")
        except OSError as error:
            self._give_up(error)

    def _parse(self, line: bytes) -> tuple[str, Facts] | None:
        digest, _, payload = line.partition(b" ")
        if digest != self._checksum(payload):
            return None
        path, *facts = json.loads(payload)
        return path, tuple(facts)

    def _checksum(self, payload: bytes) -> bytes:
        return hashlib.sha256(self.name.encode() + payload).hexdigest()[:_DIGEST_LETTERS].encode()

    def _lock(self, descriptor: int) -> None:
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            raise DatasetError(
                f"the same is running already on this machine (it holds {self._path}); wait for it, or end it first"
            ) from None
        except (ImportError, OSError) as error:
            _log.info("no lock on %s (%s): nobody sees whether the same is running already", self._path, error)

    def _give_up(self, error: OSError) -> None:
        _log.warning("cannot keep what is done in %s (%s); an interrupted run begins anew", self._path, error)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


def _facts(files: tuple[FileState, ...]) -> Facts:
    return tuple(fact for file in files for fact in (file.num_bytes, file.version))
