"""Status of a build, which `streamvid shard --status` reads from another process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from streamvid.dataset.sealed_json import MANIFEST
from streamvid.errors import DatasetError, StorageError
from streamvid.host.findings import Findings
from streamvid.host.journal import include_any
from streamvid.host.lock import try_lock
from streamvid.sharder.rejections import OTHER
from streamvid.sharder.work.destination import STAGING, Destination
from streamvid.sharder.work.shared_journal import lines_of
from streamvid.sharder.work.staging import JOURNALS, LOCK, Staging
from streamvid.sharder.work.tasks import PHASES, TASKS, task_folder
from streamvid.storage import LocalStore

State: TypeAlias = Literal["running", "stopped", "sealed"]
_FILE = "status.json"
_SECONDS_BETWEEN_WRITES, _SECONDS_BETWEEN_PUBLICATIONS = 1.0, 30.0
_SECONDS_ALIVE = 600.0


@dataclass(frozen=True, slots=True)
class Phase:
    """Progress of one phase of a build.

    done, total: numbers of files, clips or shards.
    done_before: number that an earlier run had finished.
    seconds: time that this run has spent in the phase.
    """

    name: str
    done: int
    total: int
    done_before: int
    seconds: float

    @property
    def per_second(self) -> float | None:
        """Average rate of this run in units per second, or None if this run has not finished anything yet."""
        done = self.done - self.done_before
        return done / self.seconds if done > 0 and self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Expected remaining time of the phase at its average rate, or None if the rate is unknown."""
        return None if self.per_second is None else (self.total - self.done) / self.per_second

    def to_json(self) -> dict[str, Any]:
        """Return the fields, the rate and the remaining time as JSON-serializable values."""
        return {**asdict(self), "per_second": self.per_second, "seconds_left": self.seconds_left}


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """Status of a build.

    state: "running" if a sharder holds the lock of the build; "stopped" if the build is unfinished and no sharder holds
        the lock, so that the same command resumes the build; "sealed" if the dataset is finished.
    host, pid: machine and process ID of the last run.
    seconds_ago: seconds since `phases` was last updated; a run updates it about once per second.
    phases: phases of the last run, the current one last; for tasks, sums over the tasks that have started.
    rejections: kind of rejection → number of files or clips.
    num_tasks: number of tasks that have started; 0 without tasks.
    """

    url: str
    state: State
    host: str = ""
    pid: int = 0
    seconds_ago: float = 0.0
    phases: tuple[Phase, ...] = ()
    rejections: Mapping[str, int] = field(default_factory=dict)
    num_tasks: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-serializable values."""
        return {**asdict(self), "phases": [phase.to_json() for phase in self.phases]}


class StatusFile:
    """Progress callback that also writes the progress to a file in the staging folder, at most once per second."""

    def __init__(self, staging: Staging, progress: Callable[[str, int, int], None]) -> None:
        self._folder, self._lease, self._progress = staging.own, staging.lease, progress
        is_published = not staging.store.is_local and not staging.share.is_whole
        self._published = (staging.store, f"{STAGING}/{task_folder(staging.share)}/{_FILE}") if is_published else None
        self._phases: dict[str, Phase] = {}
        self._since = self._written_at = self._published_at = 0.0
        self._current = ""

    def __call__(self, name: str, done: int, total: int) -> None:
        self._lease.check()
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
                self._publish(data)

    def _publish(self, data: bytes) -> None:
        """Copy the status of a task to the object store, where other machines read it."""
        now, is_complete = time.monotonic(), all(phase.done == phase.total for phase in self._phases.values())
        is_due = is_complete or now - self._published_at >= _SECONDS_BETWEEN_PUBLICATIONS
        if self._published is not None and is_due:
            self._published_at = now
            store, path = self._published
            store.put(path, data)


def read_status(dest: Destination) -> ShardStatus:
    """Return the status of the build at `dest`, with all of its tasks.

    Raises DatasetError if there is neither a dataset nor a build.
    """
    try:
        notes = _status_notes(dest)
        rejections = _count_rejections(dest)
    except (OSError, StorageError):  # also raised if the build ends in the meantime and removes its folder
        notes = []
    if not notes:
        if dest.store.size(MANIFEST) is not None:
            return ShardStatus(dest.url, "sealed")
        raise DatasetError(
            f"there is neither a dataset at {dest.url} nor an unfinished build in {dest.folder} on this machine; if "
            "another machine is building the dataset, run --status there, with the same --work-dir"
        )
    latest = max(notes, key=lambda note: note.time)
    num_tasks = sum(note.is_task for note in notes)
    phases = _phases([note for note in notes if note.is_task == latest.is_task])
    is_running = any(note.is_running for note in notes)
    return ShardStatus(
        dest.url,
        "running" if is_running else "stopped",
        latest.host,
        latest.pid,
        latest.seconds_ago,
        phases,
        rejections,
        num_tasks,
    )


def read_task_phases(dest: Destination) -> tuple[Phase, ...]:
    """Return the combined phases of all tasks without reading journals. Raises StorageError if the store fails."""
    return _phases([note for note in _status_notes(dest) if note.is_task])


@dataclass(frozen=True, slots=True)
class _Note:
    """Status of one run or task. is_locked: True if it runs on this machine."""

    host: str
    pid: int
    time: float
    phases: tuple[Phase, ...]
    is_task: bool
    is_locked: bool

    @property
    def seconds_ago(self) -> float:
        return max(0.0, time.time() - self.time)

    @property
    def is_running(self) -> bool:
        """True if the run holds its lock, or if a task, possibly on another machine, has written recently."""
        return self.is_locked or (self.is_task and self.seconds_ago < _SECONDS_ALIVE and not self._has_ended)

    @property
    def _has_ended(self) -> bool:
        return all(phase.done == phase.total for phase in self.phases)


def _status_notes(dest: Destination) -> list[_Note]:
    found = []
    main = dest.folder / _FILE
    if main.exists():
        found.append((main.read_bytes(), dest.folder, False))
    for state in dest.store.files(f"{STAGING}/{TASKS}"):
        if state.path.endswith(f"/{_FILE}"):
            folder = dest.folder / TASKS / Path(state.path).parent.name
            found.append((dest.store.read(state.path), folder, True))
    notes = []
    for data, folder, is_task in found:
        with contextlib.suppress(ValueError, TypeError, KeyError):  # not written by a sharder
            notes.append(_parse_note(data, folder, is_task))
    return notes


def _parse_note(data: bytes, folder: Path, is_task: bool) -> _Note:
    said = json.loads(data)
    lock = try_lock(folder / LOCK) if folder.is_dir() else None
    is_locked = lock is None and folder.is_dir()
    if lock is not None:
        lock.release()
    phases = [Phase(**phase) for phase in said["phases"]]
    numbers = [said["time"], *(n for one in phases for n in (one.done, one.total, one.done_before, one.seconds))]
    if any(phase.name not in PHASES for phase in phases) or not all(map(math.isfinite, numbers)):
        raise ValueError
    note = _Note(str(said["host"]), int(said["pid"]), said["time"], tuple(phases), is_task, is_locked)
    if note.is_running:  # the last phase has continued since the note was written
        phases[-1:] = [replace(phase, seconds=phase.seconds + note.seconds_ago) for phase in phases[-1:]]
    return replace(note, phases=tuple(phases))


def _phases(notes: Sequence[_Note]) -> tuple[Phase, ...]:
    """Return the combined phases of all runs: the sums of the numbers, and the longest time."""
    found: dict[str, Phase] = {}
    for phase in sorted((phase for note in notes for phase in note.phases), key=lambda phase: PHASES.index(phase.name)):
        sums = found.get(phase.name, Phase(phase.name, 0, 0, 0, 0.0))
        found[phase.name] = Phase(
            phase.name,
            sums.done + phase.done,
            sums.total + phase.total,
            sums.done_before + phase.done_before,
            max(sums.seconds, phase.seconds),
        )
    return tuple(found.values())


def _count_rejections(dest: Destination) -> dict[str, int]:
    """Return the number of rejections in all journals, by kind."""
    findings = Findings()
    for name in JOURNALS:
        if (dest.folder / name).exists():
            with (dest.folder / name).open("rb") as file:
                include_any(findings, file)
        for state in dest.store.files(f"{STAGING}/{TASKS}"):
            if state.path.endswith(f"/{name}"):
                include_any(findings, lines_of(dest.store, state))
    rejected = (
        found for found in findings.values() if isinstance(found, dict) and isinstance(found.get("rejected"), str)
    )
    kinds = (str(finding.get("kind") or OTHER) for finding in rejected)
    return dict(Counter(kinds).most_common())
