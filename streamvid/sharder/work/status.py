"""Status of a build, which `streamvid shard --status` reads from another process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from streamvid.dataset.manifest import MANIFEST
from streamvid.errors import DatasetError, StorageError
from streamvid.host.journal import stored_findings
from streamvid.host.lock import try_lock
from streamvid.sharder.rejections import OTHER
from streamvid.sharder.work.destination import Destination
from streamvid.sharder.work.staging import JOURNALS, LOCK
from streamvid.storage import LocalStore

State: TypeAlias = Literal["running", "stopped", "sealed"]
_FILE = "status.json"
_SECONDS_BETWEEN_WRITES = 1.0


@dataclass(frozen=True, slots=True)
class Phase:
    """Progress of one phase of a build.

    done, total: numbers of rows, files, clips or shards. done_before: number that an earlier run had finished.
    seconds: time that this run has spent in the phase.
    """

    name: str
    done: int
    total: int
    done_before: int
    seconds: float

    @property
    def per_second(self) -> float | None:
        """Average rate of this run; None if this run has not finished anything yet."""
        done = self.done - self.done_before
        return done / self.seconds if done > 0 and self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Expected remaining time of the phase at its average rate; None if the rate is unknown."""
        return None if self.per_second is None else (self.total - self.done) / self.per_second

    def to_json(self) -> dict[str, Any]:
        """Return the fields, the rate and the remaining time as JSON-serializable values."""
        return {**asdict(self), "per_second": self.per_second, "seconds_left": self.seconds_left}


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """Status of a build.

    state: "running" if a sharder holds the lock of the build; "stopped" if the build is unfinished and no sharder holds
        the lock, so that the same command resumes the build; "sealed" if the dataset is finished.
    host, pid: machine and process of the last run.
    seconds_ago: age of `phases`, which a run updates about once per second.
    phases: phases of the last run, the current one last. rejections: kind of rejection → number of files or clips.
    """

    url: str
    state: State
    host: str = ""
    pid: int = 0
    seconds_ago: float = 0.0
    phases: tuple[Phase, ...] = ()
    rejections: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-serializable values."""
        return {**asdict(self), "phases": [phase.to_json() for phase in self.phases]}


class StatusFile:
    """Progress callback that also writes the progress to a file in the staging folder, at most once per second."""

    def __init__(self, folder: Path, progress: Callable[[str, int, int], None]) -> None:
        self._folder, self._progress = folder, progress
        self._phases: dict[str, Phase] = {}
        self._since = self._written_at = 0.0
        self._current = ""

    def __call__(self, name: str, done: int, total: int) -> None:
        now, is_new = time.monotonic(), name != self._current
        if is_new:
            self._current, self._since = name, now
        before = done if is_new else self._phases[name].done_before
        self._phases[name] = Phase(name, done, total, before, now - self._since)
        if is_new or done == total or now - self._written_at >= _SECONDS_BETWEEN_WRITES:
            self._written_at = now
            self._write()
        self._progress(name, done, total)

    def _write(self) -> None:
        about = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        data = json.dumps({**about, "phases": [asdict(phase) for phase in self._phases.values()]}).encode()
        if self._folder.is_dir():  # sealing removes the folder before its last step
            # The build does not depend on this file. If the disk is full, another write reports the error.
            with contextlib.suppress(StorageError):
                LocalStore(self._folder).put(_FILE, data)


def read_status(dest: Destination) -> ShardStatus:
    """Return the status of the build at `dest`. Raises DatasetError if there is neither a dataset nor a build."""
    folder = dest.folder
    try:
        said = json.loads((folder / _FILE).read_bytes())
        lock = try_lock(folder / LOCK)
        rejections: Counter[str] = Counter()
        for journal in JOURNALS:
            rejections.update(_kinds(folder / journal))
    except OSError:  # also raised if the build ends in the meantime and removes its folder
        if dest.store.size(MANIFEST) is not None:
            return ShardStatus(dest.url, "sealed")
        raise DatasetError(
            f"there is neither a dataset at {dest.url} nor an unfinished build in {folder} on this machine; if another "
            "machine is building the dataset, run --status there, with the same --work-dir"
        ) from None
    if lock is not None:
        lock.release()
    state: State = "running" if lock is None else "stopped"
    seconds_ago = max(0.0, time.time() - said["time"])
    phases = [Phase(**phase) for phase in said["phases"]]
    if state == "running":  # the last phase has continued since the file was written
        phases[-1:] = [replace(phase, seconds=phase.seconds + seconds_ago) for phase in phases[-1:]]
    counts = dict(rejections.most_common())
    return ShardStatus(dest.url, state, said["host"], said["pid"], seconds_ago, tuple(phases), counts)


def _kinds(journal: Path) -> list[str]:
    findings = stored_findings(journal) if journal.exists() else {}
    return [finding.get("kind") or OTHER for finding in findings.values() if "rejected" in finding]
